"""What every policy must do, as tests: subclass, provide a fixture, and the policy is enrolled.

    class TestMine(PolicyContract):
        @pytest.fixture
        def make(self):
            return MyPolicy                  # called with the number of blocks that the tier holds

The suite asks for what the engine relies on, never for a particular order: that is for tests of the policy's own.

Units: handles, blocks.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.errors import InvariantError
from kvtier.policies.base import Access, Hint, Policy, PolicyMaker, SupportsHints, SupportsSizes

SMALL, LARGE = 4096, 8192


def size_class_of(handle: int) -> int:
    """Every third test handle is large."""
    return LARGE if handle % 3 == 0 else SMALL


class UsedTier:
    """A tier under a policy, and what the policy has to know of it: which handles are resident, and which were once."""

    def __init__(self, make: PolicyMaker, blocks: int = 12) -> None:
        self.blocks = blocks
        self.policy: Policy = make(blocks)
        self.resident: set[int] = set()
        self.seen: set[int] = set()

    def access(self, handle: int, how: Access = Access.FILL) -> None:
        """One access as the engine makes it: a reuse, or an eviction if the tier is full, and then `how`."""
        if handle in self.resident:
            self.policy.touch([handle], Access.REUSE)
            return
        if len(self.resident) >= self.blocks:
            victims = self.policy.candidates(1, incoming=handle)
            self.policy.evict(victims, incoming=handle)
            self.resident.difference_update(victims)
        self.policy.touch([handle], how, size_class_of(handle))
        self.resident.add(handle)
        self.seen.add(handle)

    def use(self, accesses: int = 200, seed: int = 0) -> "UsedTier":
        """Accesses of which some repeat soon, some late, some never."""
        rng = random.Random(seed)
        for number in range(accesses):
            kind = rng.random()
            near, far = rng.randrange(self.blocks), rng.randrange(3 * self.blocks)
            handle = near if kind < 0.3 else far if kind < 0.8 else 100 + number
            self.access(handle, Access.MOVED if rng.random() < 0.1 else Access.FILL)
        return self


class PolicyContract:
    """Holds for every policy."""

    @pytest.fixture
    def tier(self, make: PolicyMaker) -> Iterator[UsedTier]:
        """A full tier that was used for a while; whatever a test does, the policy must add up at its end."""
        tier = UsedTier(make).use()
        yield tier
        assert tier.policy.check() == []

    # ------------------------------------------------------------ residents

    def test_it_knows_who_is_resident(self, make: PolicyMaker) -> None:
        """The directory and the policy would part: READY copies that never leave, or leave twice."""
        tier = UsedTier(make)
        for number in range(150):
            tier.use(1, seed=number)
            policy = tier.policy
            assert len(policy) == len(tier.resident)
            assert set(policy.candidates(len(policy))) == tier.resident
            assert all(policy.remembers(handle) for handle in tier.resident)
            assert policy.check() == []

    def test_only_new_content_makes_resident(self, make: PolicyMaker) -> None:
        """A late REUSE or RELEASE would bring back a copy that is gone."""
        policy = make(8)
        policy.touch([1, 2], Access.REUSE)
        policy.touch([1, 2], Access.RELEASE)
        assert len(policy) == 0
        assert not policy.remembers(1)
        policy.touch([1], Access.FILL)
        policy.touch([2], Access.MOVED)
        policy.touch([1, 2], Access.FILL)
        policy.touch([2, 1], Access.MOVED)
        assert sorted(policy.candidates(2)) == [1, 2]
        assert len(policy) == 2

    def test_evicting_who_is_not_there_is_an_error(self, tier: UsedTier) -> None:
        """The directory and the policy would part in silence."""
        [victim] = tier.policy.candidates(1)
        tier.policy.evict([victim])
        assert len(tier.policy) == len(tier.resident) - 1
        for handle in (victim, 10_000, -1):
            with pytest.raises(InvariantError):
                tier.policy.evict([handle])
        assert len(tier.policy) == len(tier.resident) - 1

    def test_more_than_there_is_room_for(self, tier: UsedTier) -> None:
        """Pinned blocks, or a tier that shrinks, would break the policy's sums."""
        policy = tier.policy
        policy.touch(range(200, 260), Access.FILL, SMALL)
        tier.resident |= set(range(200, 260))
        assert set(policy.candidates(len(policy))) == tier.resident
        assert policy.check() == []
        while len(policy):
            policy.evict(policy.candidates(1))
            assert policy.check() == []

    # ------------------------------------------------------------ choosing

    def test_choosing_changes_nothing(self, tier: UsedTier) -> None:
        """Planning ahead would change who leaves; a plan that is dropped would have left its mark."""
        policy = tier.policy
        before = policy.snapshot()
        for incoming in [None, 999, *sorted(tier.seen)]:
            for count in (0, 1, 3, len(policy), len(policy) + 1):
                chosen = policy.candidates(count, incoming=incoming)
                assert policy.candidates(count, incoming=incoming) == chosen
                policy.candidates(count, {0, 1}, SMALL, incoming)
        assert policy.snapshot() == before

    def test_exactly_as_many_or_none(self, tier: UsedTier) -> None:
        """A caller would evict half of what it needs, for nothing."""
        policy = tier.policy
        for count in range(-1, len(policy) + 3):
            chosen = policy.candidates(count)
            assert len(chosen) == (count if 0 < count <= len(policy) else 0)
            assert len(set(chosen)) == len(chosen)
            assert set(chosen) <= tier.resident

    def test_the_pinned_stay(self, tier: UsedTier) -> None:
        """A block that a request uses would be overwritten."""
        policy = tier.policy
        order = policy.candidates(len(policy))
        for count in range(len(order) + 1):
            pinned = set(order[:count])
            rest = len(order) - count
            assert set(policy.candidates(rest, pinned)) == tier.resident - pinned
            assert policy.candidates(rest + 1, pinned) == []
            if rest:
                assert not set(policy.candidates(1, pinned)) & pinned

    def test_of_one_size_class(self, tier: UsedTier) -> None:
        """Evicting would free places that the new block does not fit into."""
        policy = tier.policy
        for size_class in (SMALL, LARGE):
            alike = {handle for handle in tier.resident if size_class_of(handle) == size_class}
            assert alike
            assert set(policy.candidates(len(alike), size_class=size_class)) == alike
            assert policy.candidates(len(alike) + 1, size_class=size_class) == []
            assert set(policy.candidates(len(alike) - 1, {min(alike)}, size_class)) == alike - {min(alike)}
        assert policy.candidates(1, size_class=SMALL + LARGE) == []

    def test_new_content_may_have_another_size(self, tier: UsedTier) -> None:
        """A block would be counted in the class of the copy that it replaces."""
        handle = min(tier.resident)
        for access in (Access.FILL, Access.MOVED):
            size_class = 5 * SMALL if access is Access.FILL else 6 * SMALL
            tier.policy.touch([handle], access, size_class)
            tier.policy.touch([handle], Access.REUSE)
            assert tier.policy.candidates(1, size_class=size_class) == [handle]

    # ------------------------------------------------------------ ghosts

    def test_ghosts_are_told_of_once(self, make: PolicyMaker) -> None:
        """The directory would keep names for ever, or give up one that the policy counts on."""
        tier = UsedTier(make)
        policy = tier.policy
        for number in range(150):
            before = set(policy.ghosts())
            tier.use(1, seed=number)
            ghosts = policy.ghosts()
            assert set(ghosts) == {handle for handle in tier.seen - tier.resident if policy.remembers(handle)}
            assert len(set(ghosts)) == len(ghosts)
            told = policy.forgotten()
            assert before - set(ghosts) - tier.resident <= set(told) <= tier.seen
            assert len(set(told)) == len(told)
            assert not any(policy.remembers(handle) for handle in told)
            assert policy.forgotten() == []

    def test_forgetting_leaves_no_trace(self, tier: UsedTier) -> None:
        """The handle, given to another key, would inherit a history."""
        policy = tier.policy
        policy.forget([*sorted(tier.seen), 10_000, -1])
        assert len(policy) == 0
        assert policy.ghosts() == policy.forgotten() == []
        assert not any(policy.remembers(handle) for handle in tier.seen)
        assert policy.check() == []

    # ------------------------------------------------------------ another size

    @pytest.mark.parametrize("blocks", [0, 1, 5, 40])
    def test_resizing_drops_no_resident(self, tier: UsedTier, blocks: int) -> None:
        """A tier that shrinks would lose track of blocks that are still in it."""
        policy = tier.policy
        policy.forgotten()
        before = set(policy.ghosts())
        policy.resize(blocks)
        assert policy.check() == []
        assert set(policy.candidates(len(policy))) == tier.resident
        assert set(policy.forgotten()) == before - set(policy.ghosts())
        while len(policy) > blocks:
            policy.evict(policy.candidates(1))
            assert policy.check() == []
        policy.resize(tier.blocks)

    def test_it_knows_sizes_of_many(self, tier: UsedTier) -> None:
        """After a restart a block would be sought in the size class of another that lay at its place before."""
        if not isinstance(tier.policy, SupportsSizes):
            pytest.skip("it cannot tell, and is asked in another way")
        handles = np.array([*sorted(tier.seen), 10_000], np.int64)
        expected = [size_class_of(handle) if handle in tier.resident else -1 for handle in handles.tolist()]
        assert tier.policy.sizes_of(handles).tolist() == expected

    # ------------------------------------------------------------ snapshots

    def test_a_snapshot_is_the_whole_state(self, tier: UsedTier, make: PolicyMaker) -> None:
        """After a restart other blocks would leave than without one."""
        twin = UsedTier(make, tier.blocks)
        twin.access(7)
        twin.policy.restore(tier.policy.snapshot())
        twin.resident, twin.seen = set(tier.resident), set(tier.seen)
        assert twin.policy.snapshot() == tier.policy.snapshot()
        for seed in range(3):
            tier.use(seed=seed)
            twin.use(seed=seed)
            assert twin.policy.snapshot() == tier.policy.snapshot()
        assert twin.policy.check() == []

    def test_damage_is_refused_and_changes_nothing(self, tier: UsedTier, make: PolicyMaker) -> None:
        """A torn or foreign snapshot would be taken for an order."""
        policy = UsedTier(make).use(seed=1).policy
        before, state = policy.snapshot(), tier.policy.snapshot()
        flipped = [state[:at] + bytes([state[at] ^ 1 << at % 8]) + state[at + 1 :] for at in range(len(state))]
        torn = [state[:at] for at in range(len(state))]
        for damaged in [*flipped, *torn, state + b"\0", state[::-1], bytes(len(state))]:
            with pytest.raises(ValueError):
                policy.restore(damaged)
        assert policy.snapshot() == before
        assert policy.check() == []

    def test_handles_of_now(self, tier: UsedTier, make: PolicyMaker) -> None:
        """After a restart, when keys have other handles, the order would be that of other blocks."""
        policy = make(tier.blocks)
        policy.restore(tier.policy.snapshot(), {handle: 1000 - handle for handle in tier.seen | {9999}})
        order = tier.policy.candidates(len(tier.policy))
        assert policy.candidates(len(order)) == [1000 - handle for handle in order]
        for size_class in (SMALL, LARGE):
            alike = [1000 - handle for handle in tier.policy.candidates(1, size_class=size_class)]
            assert policy.candidates(1, size_class=size_class) == alike
        assert set(policy.ghosts()) == {1000 - handle for handle in tier.policy.ghosts()}
        assert policy.check() == []

    def test_handles_without_a_name_are_left_out(self, tier: UsedTier, make: PolicyMaker) -> None:
        """A block that did not survive the restart would be resident for ever."""
        names = {handle: handle + 1000 for handle in tier.seen if handle % 2}
        policy = make(tier.blocks)
        policy.restore(tier.policy.snapshot(), names)
        kept = {names[handle] for handle in tier.resident if handle in names}
        assert set(policy.candidates(len(policy))) == kept
        assert set(policy.ghosts()) == {names[handle] for handle in tier.policy.ghosts() if handle in names}
        assert policy.check() == []
        policy.restore(tier.policy.snapshot(), {})
        assert len(policy) == 0
        assert policy.ghosts() == []

    def test_two_handles_with_one_name_are_refused(self, tier: UsedTier) -> None:
        """Two blocks would share a place in the order, and one of them never leave."""
        before = tier.policy.snapshot()
        first, second = sorted(tier.resident)[:2]
        same = {handle: handle for handle in tier.seen}
        for wrong in ({**same, first: second}, {**same, first: -1}, {**same, first: 2**31}):
            with pytest.raises(ValueError):
                tier.policy.restore(before, wrong)
        assert tier.policy.snapshot() == before

    def test_a_snapshot_of_a_larger_tier(self, tier: UsedTier, make: PolicyMaker) -> None:
        """After the capacity was lowered, blocks that are there would be lost, or names kept that nobody gives up."""
        policy = make(5)
        policy.restore(tier.policy.snapshot())
        assert policy.check() == []
        assert set(policy.candidates(len(policy))) == tier.resident
        told = policy.forgotten()
        assert set(told) | set(policy.ghosts()) == set(tier.policy.ghosts())
        assert len(told) + len(policy.ghosts()) == len(tier.policy.ghosts())


class HintContract(PolicyContract):
    """Holds besides for every policy that is a `SupportsHints`."""

    @pytest.mark.parametrize("hint", [Hint(ends=True), Hint(returns_in=0), Hint(returns_in=10**6)], ids=str)
    def test_a_hint_moves_and_no_more(self, tier: UsedTier, hint: Hint) -> None:
        """Somebody's guess would make blocks resident, or make them leave."""
        policy = tier.policy
        assert isinstance(policy, SupportsHints)
        ghosts, length_bytes = set(policy.ghosts()), len(policy.snapshot())
        some = sorted(tier.seen)[::2]
        used = policy.hint([*some, 10_000, -1], hint)
        assert used in (0, len(tier.resident & {*some}))
        assert set(policy.candidates(len(policy))) == tier.resident
        assert set(policy.ghosts()) == ghosts
        assert len(policy.snapshot()) == length_bytes
        assert policy.hint([], hint) == 0
