"""Bad input to the KV cache manager: an error that says what is wrong and how to mend it, and nothing has changed."""

import math

import numpy as np
import pytest

from kvtier.allocator.block_names import GROUPS_MAX
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import Group
from kvtier.errors import UsageError
from tests.manager_state import cross, full, mamba, manager_of, remembered, serve, window

PROMPT = list(range(10))


class Refused:
    """Nothing may change within, and the error must be one for users that says `text`."""

    def __init__(self, text, *things):
        self.text, self.things = text, things

    def __enter__(self):
        self.before = remembered(self.things)

    def __exit__(self, kind, error, trace):
        assert kind is not None, "accepted"
        if not issubclass(kind, UsageError):
            return False
        assert self.text in str(error), str(error)
        assert remembered(self.things) == self.before
        for thing in self.things:
            if isinstance(thing, KVCacheManager):
                assert thing.check() == []
        return True


def busy(**more):
    """A manager with a request that runs, and the request."""
    manager = manager_of(events=True, **more)
    request, _, _ = serve(manager, "running", PROMPT)
    return manager, request


# ---------------------------------------------------------------- making a manager


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"blocks_total": 0}, "give at least 2"),
        ({"blocks_total": 1}, "give at least 2"),
        ({"blocks_total": -7}, "give at least 2"),
        ({"blocks_total": True}, "give at least 2"),
        ({"blocks_total": "20"}, "give at least 2"),
        ({"blocks_total": 20.0}, "give at least 2"),
        ({"tokens_max": 0}, "tokens_max is 0; give a whole number from 1 on"),
        ({"tokens_max": -1}, "tokens_max is -1"),
        ({"tokens_max": 1.5}, "tokens_max is 1.5"),
        ({"tokens_max": "8"}, "tokens_max is '8'"),
        ({"tokens_max": True}, "tokens_max is True"),
        ({"tokens_max": None}, "tokens_max is None"),
        ({"tokens_in_flight": -1}, "tokens_in_flight is -1"),
        ({"tokens_in_flight": 2.0}, "tokens_in_flight is 2.0"),
        ({"tokens_in_flight": "a"}, "tokens_in_flight is 'a'"),
        ({"tokens_in_flight": 0}, "tokens_in_flight is 0"),
        ({"tokens_in_flight": False}, "tokens_in_flight is False"),
        ({"watermark": 1.5}, "watermark is 1.5; give a share from 0 to less than 1"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"watermark": -0.1}, "watermark is -0.1"),
        ({"watermark": math.nan}, "watermark is nan"),
        ({"watermark": math.inf}, "watermark is inf"),
        ({"watermark": "0.1"}, "watermark is '0.1'"),
        ({"watermark": None}, "watermark is None"),
        ({"hash_name": "md5"}, "unknown hash 'md5'"),
        ({"hash_name": None}, "hash is None"),
        ({"hash_name": ["sha256"]}, "pass the name of one"),
        ({"hash_seed": 3}, "seed is 3; pass a text"),
        ({"hash_tokens": 3}, "give a number that divides all block sizes, [4]"),
        ({"hash_tokens": 0}, "give a number that divides"),
        ({"hash_tokens": -4}, "give a number that divides"),
        ({"hash_tokens": 4.0}, "give a number that divides"),
        ({"hash_tokens": 2}, "with one group"),
        ({"retention_tokens": 3}, "give a multiple of 4"),
        ({"retention_tokens": -4}, "give a multiple of 4"),
        ({"retention_tokens": "4"}, "give a multiple of 4"),
        ({"retention_tokens": 4}, "leave it out"),
        ({"caching": "no"}, "caching is 'no'"),
        ({"caching": None}, "caching is None"),
        ({"eagle": "no"}, "eagle is 'no'"),
        ({"events": 1}, "events is 1"),
    ],
)
def test_a_manager_that_cannot_work_is_not_made(more, text):
    """A wrong setting shows when the first request comes, or never."""
    with Refused(text):
        manager_of(**more)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ((), "groups is ()"),
        (None, "groups is None"),
        ((full(), cross(8)), "caching=False"),
        ([full()] * (GROUPS_MAX + 1), f"1 to {GROUPS_MAX}"),
        ([full().spec], "Group"),
        ("full", "Group"),
        (3, "Group"),
        ([None], "Group"),
        ([{"kind": "full"}], "Group"),
        (full(), "Group"),
        ([Group(None)], "spec"),
        ([Group("full")], "spec"),
    ],
)
def test_unknown_groups_are_refused(groups, text):
    """What is no group gives a traceback from deep within."""
    with Refused(text):
        KVCacheManager(groups, 20, tokens_max=64)


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], "has no tokens; a prompt needs at least one"),
        (np.array([], int), "has no tokens"),
        ([-1], "token 0 is -1, not an integer from 0 to 2**32-1"),
        ([1] * 9 + [-1], "token 9 is -1"),
        ([1, 2, 3, 4, -5, 6, 7, 8], "token 4 is -5"),
        ([2**32], "token 0 is 4294967296"),
        ([2**64], "token 0 is 18446744073709551616"),
        ([True], "token 0 is True"),
        ([1.0], "token 0 is 1.0"),
        ([math.nan], "token 0 is nan"),
        (["a"], "token 0 is 'a'"),
        ([None], "token 0 is None"),
        ([[1, 2]], "pass a flat list of token ids"),
        ("abc", "pass a flat list of token ids"),
        (b"abc", "pass a flat list of token ids"),
        (5, "pass a flat list of token ids"),
        (None, "pass a flat list of token ids"),
        (np.zeros((2, 2), int), "pass a flat list of token ids"),
        (np.array(5), "pass a flat list of token ids"),
        (np.ones(3), "token 0 is 1.0"),
        (np.array([True]), "token 0 is True"),
        ([1] * 65, "more than tokens_max, 64; cut its prompt"),
        ({3, 1, 2}, "pass a flat list of token ids"),
        ({1: 2}, "pass a flat list of token ids"),
    ],
    ids=str,
)
def test_prompts_that_are_none_are_refused(tokens, text):
    """A prompt gets the name of another, or breaks the manager for all."""
    for caching in (True, False):
        manager, request = busy(caching=caching)
        with Refused(text, manager, request):
            manager.request("new", tokens)


@pytest.mark.parametrize(
    "tokens", [[2**32 - 1], (1, 2), range(5), np.arange(5), np.arange(5, dtype=np.uint16), iter([1, 2])], ids=type
)
def test_all_that_holds_token_ids_is_a_prompt(tokens):
    """A tokenizer's array has to be turned into a list first."""
    manager = manager_of()
    request = manager.request("new", tokens)
    assert all(type(token) is int for token in request.tokens)


@pytest.mark.parametrize("request_id", ["", None, 3, b"r", ["r"]])
def test_an_id_is_a_text(request_id):
    """Two requests without an id are taken for one."""
    manager, request = busy()
    with Refused("give a text that is not empty", manager, request):
        manager.request(request_id, PROMPT)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"extra": {"cache_salt": "s"}}, "pass ExtraKeys"),
        ({"extra": "s"}, "pass ExtraKeys"),
        ({"reads_cache": "no"}, "reads_cache"),
    ],
)
def test_what_else_makes_a_request_is_looked_at(more, text):
    """A tenant's salt is left out of the names of its blocks."""
    manager, request = busy()
    with Refused(text, manager, request):
        manager.request("new", PROMPT, **more)


def test_extras_are_looked_at_without_caching_too():
    """A wrong salt is found when caching is switched on, in production."""
    manager = manager_of(caching=False)
    with Refused("pass ExtraKeys", manager):
        manager.request("new", PROMPT, extra="s")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([-1], "token 10 is -1"),
        ([1, 2, 2**32], "token 12 is"),
        ([1] * 9 + [1.5], "token 19 is 1.5"),
        ([True], "token 10 is True"),
        ("ab", "flat list"),
        (None, "flat list"),
        (7, "flat list"),
        (np.zeros((1, 2), int), "flat list"),
    ],
    ids=str,
)
def test_tokens_that_are_none_are_not_appended(tokens, text):
    """A sampled token that is none is in the table, and all later names are wrong."""
    for caching in (True, False):
        manager, request = busy(caching=caching)
        with Refused(text, manager, request):
            request.append(tokens)
        request.append([1, 2])
        assert request.tokens == [*PROMPT, 1, 2]
        assert len(request.hashes) == 3 * caching


# ---------------------------------------------------------------- growing


NUMBERS = ("new_tokens", "lookahead_tokens", "external_tokens", "encoder_tokens", "reserved_blocks")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, -(10**9), "1", None, 1.0, 1.5, True], ids=str)
def test_numbers_that_are_no_counts_are_refused(name, value):
    """A negative number of tokens takes blocks away; half a token fails in the middle."""
    for state in ("running", "new"):
        manager, request = busy()
        if state == "new":
            request = manager.request("new", PROMPT)
        with Refused("", manager, request):
            manager.allocate_slots(request, **{"new_tokens": 1, name: value})


def test_a_step_of_nothing_is_refused():
    """An engine that forgot to say what it computes gets an empty answer, and writes somewhere."""
    manager, request = busy()
    new = manager.request("new", [9] * 5)
    for one, hit in ((request, None), (new, None), (new, manager.get_computed_blocks(new))):
        with Refused("asks for nothing; give new_tokens, external_tokens or a hit", manager, one):
            manager.allocate_slots(one, 0, hit)


@pytest.mark.parametrize("name", ["new_tokens", "external_tokens"])
@pytest.mark.parametrize("value", [55, 10**9])
def test_more_than_the_longest_request_is_refused(name, value):
    """A table grows longer than the kernels' tables are."""
    manager, request = busy(blocks_total=100)
    with Refused("would exceed tokens_max, 64; end it before", manager, request):
        manager.allocate_slots(request, **{"new_tokens": 1, name: value})


def test_a_hit_counts_towards_the_longest_request():
    """A table grows longer than the kernels' tables are, for a request that begins with a hit."""
    manager, _ = busy(blocks_total=100)
    new = manager.request("new", PROMPT)
    with Refused("would exceed tokens_max", manager, new):
        manager.allocate_slots(new, 60, manager.get_computed_blocks(new))


@pytest.mark.parametrize("hit", [[[1]], 3, ([1], 4), "hit"], ids=str)
def test_a_hit_is_the_answer_to_a_lookup(hit):
    """A list of blocks is taken for a hit."""
    manager, _ = busy()
    new = manager.request("new", PROMPT)
    with Refused("get_computed_blocks", manager, new):
        manager.allocate_slots(new, 2, hit)


def test_a_hit_of_another_request_is_refused():
    """A request reads KV of another prompt."""
    manager, _ = busy()
    hit = manager.get_computed_blocks(manager.request("equal", PROMPT))
    new = manager.request("new", [7] * 10)
    with Refused("get_computed_blocks", manager, new):
        manager.allocate_slots(new, 2, hit)


def test_a_hit_of_another_manager_is_refused():
    """A request reads blocks that hold nothing."""
    other, _ = busy()
    hit = other.get_computed_blocks(other.request("new", PROMPT))
    manager = manager_of()
    new = manager.request("new", PROMPT)
    with Refused("", manager, new):
        manager.allocate_slots(new, 2, hit)


def test_a_running_request_takes_no_hit():
    """The blocks that a request computed are lost, and replaced by others."""
    manager, request = busy()
    hit = manager.get_computed_blocks(request)
    with Refused("has blocks and takes no hit; free or preempt it first", manager, request):
        manager.allocate_slots(request, 2, hit)


def test_two_requests_of_one_id_do_not_share_a_table():
    """A second request with the id of a running one writes into its blocks."""
    manager, request = busy()
    twin = manager.request("running", PROMPT)
    hit = manager.get_computed_blocks(twin)
    for more in ({"hit": hit}, {}):
        with Refused("give each an id of its own, or free it first", manager, request, twin):
            manager.allocate_slots(twin, 2, **more)
    for verb in (manager.free, manager.preempt, manager.common_prefix_blocks):
        with Refused("holds no blocks", manager, request, twin):
            verb(twin)


def test_a_freed_request_does_not_go_on():
    """Blocks that were never computed are named and served: the request's counter says they are there."""
    manager, request = busy()
    manager.free(request)
    request.append([1])
    with Refused("", manager, request):
        manager.allocate_slots(request, 1)


def test_an_encoder_has_no_more_tokens_than_was_said():
    """More blocks are taken than sizing counted."""
    manager = manager_of(full(), cross(8), caching=False, blocks_total=30)
    request = manager.request("new", PROMPT)
    with Refused("", manager, request):
        manager.allocate_slots(request, 10, encoder_tokens=9)


# ---------------------------------------------------------------- other verbs


def verbs(manager, request):
    """Every verb that takes a request."""
    return {
        "free": lambda: manager.free(request),
        "preempt": lambda: manager.preempt(request),
        "cache_blocks": lambda: manager.cache_blocks(request, 1),
        "common_prefix_blocks": lambda: manager.common_prefix_blocks(request),
        "get_computed_blocks": lambda: manager.get_computed_blocks(request),
        "allocate_slots": lambda: manager.allocate_slots(request, 1),
        "block_ids": lambda: manager.block_ids(request),
    }


HOLDERS = ["free", "preempt", "cache_blocks", "common_prefix_blocks"]  # verbs for those that hold blocks


@pytest.mark.parametrize("name", HOLDERS)
def test_a_request_that_holds_nothing_is_refused(name):
    """A double free gives another's blocks away; an unknown request is taken for one that ended well."""
    manager, request = busy()
    never = manager.request("never", PROMPT)
    with Refused("holds no blocks: it got none, or was freed", manager, never):
        verbs(manager, never)[name]()
    manager.free(request)
    with Refused("holds no blocks: it got none, or was freed", manager, request):
        verbs(manager, request)[name]()


@pytest.mark.parametrize("name", [*HOLDERS, "get_computed_blocks", "allocate_slots", "block_ids"])
def test_a_request_of_another_manager_is_refused(name):
    """A request is served with hashes of another block size: wrong bytes."""
    manager, request = busy()
    foreign = manager_of(full(8)).request("foreign", PROMPT)
    with Refused("", manager, request, foreign):
        verbs(manager, foreign)[name]()


@pytest.mark.parametrize("name", [*HOLDERS, "get_computed_blocks", "allocate_slots", "block_ids"])
@pytest.mark.parametrize("value", [None, "running", 3, {}], ids=str)
def test_what_is_no_request_is_refused(name, value):
    """An id in place of a request gives a traceback."""
    manager, request = busy()
    with Refused("", manager, request):
        verbs(manager, value)[name]()


@pytest.mark.parametrize("count", [-1, 11, 10**9, "1", None, 1.5, True], ids=str)
def test_computed_tokens_are_some_of_the_requests(count):
    """Blocks are named for tokens that there are not."""
    manager, request = busy()
    with Refused("computed", manager, request):
        manager.cache_blocks(request, count)


@pytest.mark.parametrize("blocks", [[-1], [11], [1, 99], ["1"], [1.0], [True], [None], "12", None, 5], ids=str)
def test_blocks_that_there_are_not_cannot_be_evicted(blocks):
    """The first of two blocks is evicted, and the second is an error; or the last block is, for -1."""
    manager, request = busy()
    with Refused("", manager, request):
        manager.evict_blocks(blocks)


def copying():
    """A manager that has given one copy to be made."""
    manager = manager_of(full(8), mamba(8), blocks_total=20, hash_tokens=4)
    request = manager.request("r", PROMPT[:7])
    for tokens in (4, 3):
        manager.allocate_slots(request, tokens)
        request.computed_tokens += tokens
    (copy,) = manager.take_copies()
    return manager, copy


@pytest.mark.parametrize("copies", [[(1, 2)], [1], [(1,)], [None], "ab", None, 5], ids=str)
def test_copies_that_nobody_asked_for_cannot_be_done(copies):
    """A block's reference is given back that belongs to a request."""
    manager, _ = copying()
    with Refused("cop", manager):
        manager.copied(copies)


def test_a_copy_is_done_once():
    """A copied block is freed twice, and given to two requests."""
    manager, copy = copying()
    with Refused("done already", manager):
        manager.copied([copy, copy])
    manager.copied([copy])
    with Refused("done already", manager):
        manager.copied([copy])
    assert manager.check() == []


def test_a_failed_call_leaves_a_manager_that_works():
    """After a user's mistake requests are served differently."""
    manager, request = busy(blocks_total=30)
    twin, twin_request = busy(blocks_total=30)
    for wrong in (
        lambda: manager.allocate_slots(request, -1),
        lambda: manager.free(manager.request("x", PROMPT)),
        lambda: manager.evict_blocks([1, 99]),
        lambda: request.append([1, -1]),
        lambda: manager.cache_blocks(request, 99),
    ):
        with pytest.raises(UsageError):
            wrong()
    for one, r in ((manager, request), (twin, twin_request)):
        serve(one, "next", [*PROMPT, 4, 5])
        one.free(r)
    assert remembered(manager) == remembered(twin)


def test_a_window_that_does_not_fit_is_not_refused_for_ever():
    """A request that was refused once is refused though there is room."""
    manager = manager_of(window(5), blocks_total=4)
    blocker, _, _ = serve(manager, "blocker", PROMPT)
    new = manager.request("new", [7] * 5)
    assert manager.allocate_slots(new, 5, manager.get_computed_blocks(new)) is None
    manager.free(blocker)
    assert manager.allocate_slots(new, 5, manager.get_computed_blocks(new)) is not None


def test_a_whole_prompt_may_come_from_elsewhere_later():
    """A prefill elsewhere hands over the whole prompt; the last token is computed when it has arrived."""
    manager = manager_of()
    request = manager.request("new", PROMPT)
    assert manager.allocate_slots(request, 0, external_tokens=10, delay_naming=True) is not None
    with Refused("leave at least the last one", manager):
        manager.allocate_slots(manager.request("other", PROMPT), 1, external_tokens=10)


def test_external_tokens_come_before_any_other():
    """Blocks that a request has already are overwritten in its table, and lost."""
    for caching in (True, False):
        manager = manager_of(caching=caching)
        request = manager.request("new", PROMPT)
        assert manager.allocate_slots(request, 3) is not None
        for computed in (0, 3):
            request.computed_tokens = computed
            with Refused("external tokens", manager, request):
                manager.allocate_slots(request, 1, external_tokens=4)


def test_what_is_behind_a_window_is_passed_over():
    """Blocks of a failed load are not forgotten because the table has null blocks, too."""
    manager, request = busy()
    (table,) = manager.block_ids(request)
    manager.evict_blocks([0, table[0]])
    assert manager.pool.names.first[table[0]] is None


def test_tokens_in_flight_outlive_a_preemption():
    """A block is dropped while a step that is still under way reads it."""
    manager, request = busy()
    request.in_flight_tokens = 8
    manager.preempt(request)
    assert request.in_flight_tokens == 8
    assert request.computed_tokens == 0
