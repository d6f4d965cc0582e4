"""Conversations whose KV is kept from turn to turn, one per row of a batch.

Owns: the token ids of each conversation so far. Always: a turn's prompt is the ids of the turn before it, the model's
own included, and then the new ones. Ids are never made from the model's text again: a tokenizer may cut the same text
into other tokens, whose KV would be other blocks. Units: tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch

import kvtier
from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.errors import UsageError
from kvtier.integrations.transformers.prompt import filler_of
from kvtier.integrations.transformers.session import PrefixSession

REPLY = "\N{OBJECT REPLACEMENT CHARACTER}kvtier reply\N{OBJECT REPLACEMENT CHARACTER}"


class Chat:
    """One or more conversations with a model, all of which take a turn together.

        chat = Chat(cache, model)
        (reply,) = chat.reply([next_turn(tokenizer, messages)], max_new_tokens=64)

    `histories`: the ids of each conversation. `session`: the PrefixSession of the latest turn, for its figures.
    """

    def __init__(
        self, cache: "kvtier.SyncCache", model: Any, *, owner: str = "transformers", extra: ExtraKeys | None = None
    ) -> None:
        self._cache = cache
        self._model = model
        self._owner = owner
        self._extra = extra
        self.histories: list[list[int]] = []
        self.session: PrefixSession | None = None

    def reply(
        self, turns: Sequence[Sequence[int]], *, share_prefix: bool = False, **generate_options: Any
    ) -> list[list[int]]:
        """The model's tokens after the histories and these new ids, one list per conversation, the end token included.

        generate_options: for `model.generate()`, such as max_new_tokens, do_sample or a streamer.
        If it raises, the histories are as before. Raises UsageError for another number of conversations than before.
        """
        if not turns or not all(isinstance(turn, list | tuple) and turn for turn in turns):
            raise UsageError(f"turns is {turns!r}; pass one list of new token ids for each conversation")
        histories = self.histories or [[] for _ in turns]
        if len(turns) != len(histories):
            raise UsageError(f"{len(turns)} turns for {len(histories)} conversations; start another Chat for others")
        prompts = [history + list(turn) for history, turn in zip(histories, turns, strict=True)]
        input_ids, mask = _padded(prompts, self._model)
        session = PrefixSession(
            self._cache,
            self._model,
            input_ids,
            attention_mask=mask,
            share_prefix=share_prefix,
            owner=self._owner,
            extra=self._extra,
        )
        with session:
            output = self._model.generate(
                input_ids, **{"attention_mask": mask} | session.generate_kwargs, **generate_options
            )
            output_ids = output if isinstance(output, torch.Tensor) else output.sequences
            session.commit(output_ids)
        self.session = session
        self.histories = session.rows_of(output_ids, generate_options)
        return [row[len(prompt) :] for row, prompt in zip(self.histories, prompts, strict=True)]


def next_turn(tokenizer: Any, messages: list[dict[str, str]], history: Sequence[int] = ()) -> list[int]:
    """The ids that new messages add to a conversation, by the tokenizer's chat template.

    messages: the new ones only, as for `apply_chat_template`. history: the ids so far, which the reply ends.
    Raises UsageError if the template does not show a reply as it is.
    """
    if not history:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids
    # The text behind a reply, found by rendering one that no template will change.
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": REPLY}]
    text = tokenizer.apply_chat_template([*before, *messages], add_generation_prompt=True, tokenize=False)
    if text.count(REPLY) != 1:
        raise UsageError("the chat template does not show replies as they are; append the ids of new turns yourself")
    added: list[int] = tokenizer(text.split(REPLY)[1], add_special_tokens=False)["input_ids"]
    # The model ends its reply with the token that the template puts there, unless it was cut short.
    return added[1:] if added[:1] == list(history[-1:]) else added


def _padded(prompts: list[list[int]], model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    columns = max(map(len, prompts))
    filler = filler_of(model)[0] or 0  # masked, so any id will do
    pads = [columns - len(prompt) for prompt in prompts]
    ids = [[filler] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    return torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device)
