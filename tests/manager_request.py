"""What the tests of a manager's requests begin with: a prompt, a step of decoding, what a newcomer would find."""

PROMPT = list(range(100, 110))  # two blocks of 4 tokens and two tokens more


def decode(manager, request, token=7, **more):
    """One token more."""
    request.append([token])
    new = manager.allocate_slots(request, 1, **more)
    request.computed_tokens += 1
    return new


def found(manager, tokens, **more):
    return manager.get_computed_blocks(manager.request("looker", tokens, **more)).tokens
