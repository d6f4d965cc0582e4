"""CrossGroup: a decoder's attention to the encoder's output of its own request.

Blocks for the whole output are taken at once and shared with nobody. `tokens` are the encoder's here. Units: tokens.
"""

from collections.abc import Sequence

from kvtier.cache.groups.base import GroupManager
from kvtier.cache.groups.finding import Find, Hits
from kvtier.cache.request import Request
from kvtier.errors import InvariantError
from kvtier.types import BlockHash


class CrossGroup(GroupManager):
    """Takes no part in prefix caching."""

    shareable = False

    def longest_hit(self, hashes: Sequence[BlockHash], tokens_max: int, drop_last: bool, finds: Sequence[Find]) -> Hits:
        raise InvariantError(f"group {self.index}: cross attention was asked for a prefix")

    def adopt(self, request_id: str, hit: Sequence[int], hit_end: int, external_tokens: int) -> None:
        """There is nothing to adopt."""

    def allocate_external(self, request_id: str, hit_end: int, external_tokens: int) -> None:
        """The encoder's output never comes from elsewhere."""

    def name(self, request: Request, tokens: int) -> None:
        """Nobody else could use it."""
