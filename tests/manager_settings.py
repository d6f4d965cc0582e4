"""The models that random requests are served for: which groups, and what may happen to a request. Units: tokens."""

from dataclasses import dataclass, field

from tests.manager_state import chunked, cross, full, mamba, mla, window


@dataclass(frozen=True)
class Setting:
    """step, hash_tokens: where hits may end, and per hash. drafts: per step, at most. loads: from elsewhere.

    more: arguments of the manager.
    """

    groups: tuple
    step: int = 4
    hash_tokens: int = 4
    drafts: int = 3
    loads: bool = True
    more: dict = field(default_factory=dict)

    @property
    def eagle(self):
        return self.more.get("eagle", False)

    @property
    def caching(self):
        return self.more.get("caching", True)

    @property
    def specs(self):
        return [group.spec for group in self.groups]

    @property
    def inside(self):
        """Whether hits may end inside blocks."""
        return self.step == self.hash_tokens < max(spec.block_tokens for spec in self.specs)


BARE = {"drafts": 0, "loads": False}
SETTINGS = {
    "full": Setting((full(),)),
    "full, watermark": Setting((full(),), more={"watermark": 0.2}),
    "mla": Setting((mla(),)),
    "window": Setting((window(7),)),
    "window in a block": Setting((window(2),)),
    "full, window": Setting((full(), window(6))),
    "full, two windows": Setting((full(), window(6), window(13, retained_tokens=4))),
    "twins": Setting((window(8), full(), window(8), full())),
    "large full": Setting((full(8), window(9)), step=8),
    "large window": Setting((full(), window(10, block_tokens=8)), step=8),
    "odd sizes": Setting((full(8), window(9, block_tokens=12)), step=24),
    "chunked": Setting((chunked(12),)),
    "full, chunked": Setting((full(), chunked(12))),
    "eagle": Setting((full(),), more={"eagle": True}),
    "eagle, window": Setting((full(), window(6, eagle=True)), more={"eagle": True}),
    "eagle, both": Setting((full(), window(6)), more={"eagle": True}),
    "eagle, sizes": Setting((full(8), window(17)), step=8, more={"eagle": True}),
    "all states": Setting((full(), mamba(mode="all")), drafts=0),
    "all states, drafts": Setting((full(), mamba(mode="all", drafts=2)), drafts=0),
    "states": Setting((full(), mamba()), drafts=0),
    "states alone": Setting((mamba(),), drafts=0),
    "states, drafts": Setting((full(), mamba(drafts=1)), drafts=0),
    "twin states": Setting((full(), mamba(), mamba()), drafts=0),
    "large states": Setting((full(), mamba(8)), **BARE),
    "fine": Setting((full(8), mamba(8)), **BARE),
    "fine, window": Setting((full(8), mamba(8), window(8)), **BARE),
    "fine, drafts": Setting((full(8), mamba(8, drafts=1)), **BARE),
    "finer": Setting((full(12), mamba(12)), **BARE),
    "fine, eagle": Setting((full(8), mamba(8, drafts=1)), **BARE, more={"eagle": True}),
    "kept rarely": Setting((full(), window(5)), more={"retention_tokens": 16}),
    "kept at ends": Setting((full(), window(5)), more={"retention_tokens": 0}),
    "states kept rarely": Setting((full(), mamba()), drafts=0, more={"retention_tokens": 12}),
    "states kept at ends": Setting((full(8), mamba(8)), **BARE, more={"retention_tokens": 0}),
    "cross": Setting((full(), cross(8)), **BARE, more={"caching": False}),
    "no caching": Setting((full(), window(6)), more={"caching": False}),
}
