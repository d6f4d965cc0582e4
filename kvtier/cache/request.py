"""Request: one sequence of tokens as a request-level manager sees it, and the names of its full blocks.

Owns: the tokens and the hashes of their full blocks, which grow together. The counters are the engine's to set.
Always:  a hash for each `hash_tokens` full tokens, none where the manager keeps no prefixes.
Units:   tokens.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from kvtier.blocks.chain import HashChain
from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.blocks.packing import check_tokens
from kvtier.errors import UsageError
from kvtier.types import BlockHash


class Request:
    """Made by `KVCacheManager.request`. Tokens are added with `append`; they are never taken back.

    computed_tokens: whose KV is computed, or will be when the steps that were scheduled have ended.
    in_flight_tokens: of these, the ones of steps that have not ended.
    running: the engine has admitted it; until then the manager keeps its watermark free.
    reads_cache: it may start from others' blocks. preemptions: how often it was thrown out.
    shared_prefix_tokens: where a prefix that others have too ends (`Hit.boundary_tokens`), so that groups which keep
    few blocks keep that one.
    """

    def __init__(
        self,
        request_id: str,
        tokens: Sequence[int],
        chain: HashChain | None,
        extra: ExtraKeys | None,
        reads_cache: bool,
        home: object,
    ) -> None:
        """Raises UsageError for an id that is no text, and for a prompt that is empty or has no token ids."""
        if not isinstance(request_id, str) or not request_id:
            raise UsageError(f"request id {request_id!r}; give a text that is not empty")
        self.request_id = request_id
        self.tokens: list[int] = []
        self.extra = extra
        self.home = home  # the manager it was made for
        self.reads_cache = reads_cache
        self.computed_tokens = 0
        self.in_flight_tokens = 0
        self.preemptions = 0
        self.shared_prefix_tokens = 0
        self.running = False
        self._chain = chain
        self.append(tokens)
        if not self.tokens:
            raise UsageError(f"request {request_id!r} has no tokens; a prompt needs at least one")
        self.prompt_tokens = len(self.tokens)

    @property
    def hashes(self) -> list[BlockHash]:
        """Of the full blocks so far. Read it, don't change it."""
        return [] if self._chain is None else self._chain.hashes

    def append(self, tokens: Sequence[int]) -> None:
        """More tokens at the end (a list, or a 1-d array).

        Raises UsageError, and appends nothing, if one is no integer from 0 to 2**32-1.
        """
        if not isinstance(tokens, list):
            tokens = _listed(tokens)
        known, chain = len(self.tokens), self._chain
        self.tokens += tokens
        try:
            end = len(self.tokens)
            check_tokens(self.tokens, known if chain is None else max(known, chain.full_tokens(end)), end)
            if chain is not None:
                chain.update(self.tokens)  # looks at the others
        except UsageError:
            del self.tokens[known:]
            raise


def _listed(tokens: object) -> list[int]:
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(tokens, str | bytes | Set | Mapping) or not isinstance(tokens, Iterable):
        raise UsageError(f"tokens is {tokens!r}; pass a flat list of token ids")
    return list(tokens)
