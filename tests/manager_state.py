"""Small managers for tests, and everything that one remembers, to be compared.

Units: tokens, blocks.
"""

from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Group, Mamba, Mla, SlidingWindow

TOKENS_MAX = 64


def full(block_tokens=4, eagle=False):
    """A group of full attention."""
    return Group(FullAttention(block_tokens=block_tokens, **HEADS), eagle=eagle)


def mla(block_tokens=4):
    return Group(Mla(block_tokens=block_tokens, latent_dim=1, dtype="float32"))


def window(tokens, block_tokens=4, retained_tokens=0, eagle=False):
    spec = SlidingWindow(block_tokens=block_tokens, window=tokens, retained_tokens=retained_tokens, **HEADS)
    return Group(spec, eagle=eagle)


def chunked(chunk_tokens, block_tokens=4):
    return Group(ChunkedLocal(block_tokens=block_tokens, chunk_tokens=chunk_tokens, **HEADS))


def mamba(block_tokens=4, mode="align", drafts=0):
    state = {"shapes": ((1,),), "dtypes": ("float32",)}
    return Group(Mamba(block_tokens=block_tokens, mode=mode, speculative_blocks=drafts, **state))


def cross(encoder_tokens_max, block_tokens=4):
    return Group(CrossAttention(block_tokens=block_tokens, encoder_tokens_max=encoder_tokens_max, **HEADS))


HEADS = {"kv_heads": 1, "head_dim": 1, "dtype": "float32"}


def manager_of(*groups, blocks_total=11, tokens_max=TOKENS_MAX, **more):
    """A manager of these groups; one of full attention by default."""
    return KVCacheManager(groups or (full(),), blocks_total, tokens_max=tokens_max, **more)


def serve(manager, request_id, tokens, **more):
    """A request as a scheduler begins it: hit, and blocks for all that is left. Returns it, its hit and new blocks."""
    request = manager.request(request_id, tokens)
    hit = manager.get_computed_blocks(request)
    new = manager.allocate_slots(request, len(request.tokens) - hit.tokens, hit, **more)
    if new is not None:
        request.computed_tokens, request.running = len(request.tokens), True
    return request, hit, new


def remembered(thing):
    """All that an object of the package holds, as plain values that can be compared later."""
    return _plain(thing, set())


def _plain(thing, seen):
    if thing is None or isinstance(thing, int | float | str | bytes):
        return thing
    if isinstance(thing, dict):
        return [(_plain(key, seen), _plain(value, seen)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return sorted(thing, key=repr)
    if isinstance(thing, list | tuple):
        return [_plain(part, seen) for part in thing]
    if isinstance(thing, bytearray):
        return bytes(thing)
    if id(thing) in seen or not type(thing).__module__.startswith("kvtier"):
        return None  # functions, and what was written down already
    seen.add(id(thing))
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    names += getattr(thing, "__dict__", {})
    return [(name, _plain(getattr(thing, name), seen)) for name in names]
