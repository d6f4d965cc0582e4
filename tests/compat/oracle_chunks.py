"""Where a step of a prefill ends: as far as the budget allows, but with aligned Mamba states on the right boundary.

A state is only worth keeping where a later request can resume, so a step must end there. Units: tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunking:
    """The boundaries of one manager: its aligned Mamba block (None: there is none) and the hash's tokens.

    partial: hits may end inside a block. drop: a hit's last block is computed again (eagle).
    """

    block_tokens: int | None
    hash_tokens: int
    scheduler_tokens: int
    partial: bool
    drop: bool

    def cut(self, request, start, tokens):
        """How many of the `tokens` from `start` on this step computes; 0: too few to reach a boundary."""
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if self.block_tokens is None or start >= prefill_end:
            return tokens
        end = start + tokens
        if end < prefill_end:
            end -= end % self.block_tokens
        inside = [stop for stop in self._stops(request, start, end) if start < stop < end]
        return max(min(inside, default=end) - start, 0)

    def _stops(self, request, start, end):
        """Where a step from `start` to `end` must not run past."""
        size = self.block_tokens
        last = self._resumable(request.num_tokens, size)
        yield last
        if start % size:
            yield start - start % size + size
        if self.partial:
            tail = self._resumable(request.num_prompt_tokens, self.hash_tokens)
            if last < tail < request.num_prompt_tokens:
                yield tail
        junction = request.shared_prefix_boundary
        if start < junction < end:
            yield start + (junction - start) // size * size

    def _resumable(self, tokens, unit):
        """The last boundary at which a request with the same tokens can resume: one token is always computed."""
        limit = tokens if self.drop else tokens - 1
        return max(limit // unit * unit - (unit if self.drop else 0), 0)
