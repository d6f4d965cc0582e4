"""The encoder caches, their budget and the plan of a step: equal to vLLM's own answers, and firm against misuse."""

import json
import lzma
import pathlib
import re

import pytest

from kvtier.cache.encoder import EncoderCache, EncoderDecoderCache, EncoderItem
from kvtier.cache.encoder_budget import EncoderBudget, EncoderLimits, Modality
from kvtier.cache.encoder_items import check_order
from kvtier.cache.encoder_step import EncodingPlan, carry_out, plan_encoding
from kvtier.errors import UsageError

ROOT = pathlib.Path(__file__).parents[2]
GOLDENS = ROOT / "tests/data/vllm/encoder.jsonl.xz"
LINES = [json.loads(line) for line in lzma.decompress(GOLDENS.read_bytes()).splitlines()]
KINDS = {"shared": EncoderCache, "encoder_decoder": EncoderDecoderCache}
LIMITS = {"step_tokens_max": 512, "prompt_tokens_max": 4096, "requests_max": 8}


def scenarios():
    """The lines of one cache each, those of the budget left out."""
    starts = [number for number, line in enumerate(LINES) if "scenario" in line]
    pieces = [LINES[start:end] for start, end in zip(starts, [*starts[1:], len(LINES)], strict=True)]
    return [piece for piece in pieces if piece[0]["scenario"] in KINDS]


def name_of(piece):
    return "{scenario}-{capacity}-{lookahead}-{split}".format(**piece[0])


class Replay:
    """One cache of ours, asked what the oracle was asked."""

    def __init__(self, head):
        self.cache = KINDS[head["scenario"]](head["capacity"])
        self.options = {"lookahead_tokens": head["lookahead"], "split_items": head["split"]}
        self.items = {}

    def ask(self, line):
        request_id, index = line.get("request"), line.get("index")
        items = self.items.get(request_id, ())
        match line["op"]:
            case "new":
                spans = [None if raw[4] is None else tuple(map(tuple, raw[4])) for raw in line["items"]]
                self.items[request_id] = [EncoderItem(*raw[:4], s) for raw, s in zip(line["items"], spans, strict=True)]
            case "lookup":
                return self.cache.lookup(request_id, index, items[index])
            case "make_room":
                return self.cache.make_room(items[index], line["compute_left"], line["planned"])
            case "allocate":
                self.cache.allocate(request_id, index, items[index])
            case "free_item":
                self.cache.free_item(request_id, index)
            case "free":
                self.cache.free(request_id)
            case "reset":
                self.cache.reset()
            case "take_evicted":
                return self.cache.take_evicted()
            case "plan":
                return self.plan(request_id, items, line)
            case "carry_out":
                carry_out(
                    self.cache, request_id, items, EncodingPlan(1, 0, tuple(line["encode"]), tuple(line["repeats"]))
                )
            case "free_passed":
                ahead = self.options["lookahead_tokens"] + line["unsure"]
                self.cache.free_passed(request_id, line["computed"], ahead)
        return None

    def plan(self, request_id, items, line):
        args = line["computed"], line["new"], line["compute_left"]
        plan = plan_encoding(self.cache, request_id, items, *args, **self.options)
        return {
            "encode": list(plan.encode),
            "new_tokens": plan.new_tokens,
            "left": plan.compute_left,
            "repeats": list(plan.repeats),
            "refused": plan.refused is not None,
        }

    def state(self):
        cache = self.cache
        held = {name: cache.held(name) for name in self.items if cache.held(name)}
        if isinstance(cache, EncoderDecoderCache):
            return {"free": cache.embeddings_free, "held": {name: sorted(indexes) for name, indexes in held.items()}}
        users = {name: sorted(output.users) for name, output in cache._outputs.items()}
        reclaimable = cache.embeddings_free + cache.embeddings_idle
        return {
            "free": cache.embeddings_free,
            "held": held,
            "idle": list(cache._idle),
            "reclaimable": reclaimable,
            "users": users,
        }


def left_out(answer, compute_left):
    """What vLLM's scheduler keeps of an answer: of a plan without tokens neither items nor what they cost."""
    if isinstance(answer, dict) and answer.get("new_tokens") == 0:
        return answer | {"encode": [], "repeats": [], "left": compute_left}
    return answer


@pytest.mark.parametrize("piece", scenarios(), ids=name_of)
def test_every_answer_and_state_is_vllms_own(piece):
    """An engine that swaps the manager in encodes, evicts or schedules something else."""
    replay = Replay(piece[0])
    for number, line in enumerate(piece[1:]):
        assert replay.ask(line) == left_out(line["answer"], line.get("compute_left")), (number, line)
        state = replay.state()
        assert state == {key: line[key] for key in state}, (number, line)
        assert replay.cache.check() == []


def test_the_goldens_ask_for_everything():
    """A replay that is equal proves little, for the interesting cases never came up."""
    plans = [line["answer"] for line in LINES if line.get("op") == "plan"]
    assert {"lookup", "make_room", "free_item", "reset", "carry_out", "free_passed"} <= {
        line.get("op") for line in LINES
    }
    assert any(plan["repeats"] for plan in plans)
    assert any(plan["refused"] for plan in plans)
    assert any(plan["new_tokens"] == 0 and not plan["refused"] for plan in plans)
    assert any(line.get("op") == "take_evicted" and len(line["answer"]) > 1 for line in LINES)
    assert any(indexes != sorted(indexes) for line in LINES for indexes in line.get("held", {}).values())


def test_every_budget_is_vllms_own():
    """The encoder is given more than its memory was measured for, or less than it could do."""
    lines = [line for line in LINES if line.get("scenario") == "budget"]
    assert {line["refused"] for line in lines} == {False, True}
    for line in lines:
        modalities = {name: Modality(*numbers) for name, numbers in line["modalities"].items()}
        limits = EncoderLimits(**line["limits"])
        if line["refused"]:
            with pytest.raises(UsageError, match=f"has {limits.step_tokens_max}; raise step_tokens_max"):
                EncoderBudget.of(modalities, limits)
            continue
        budget = EncoderBudget.of(modalities, limits)
        assert (budget.compute_embeddings, budget.cache_embeddings) == (line["compute"], line["cache"])
        assert {name: [budget.items_per_prompt[name], budget.items_per_batch[name]] for name in line["items"]} == (
            line["items"]
        )
        assert set(budget.items_per_prompt) == set(budget.items_per_batch) == set(line["items"])


# ---------------------------------------------------------------- what the goldens do not say


def item(name, embeddings=4, offset=0):
    return EncoderItem(name, offset, embeddings, embeddings)


def filled(total, *names):
    """A cache that holds these outputs of 4 embeddings for request "a"."""
    cache = EncoderCache(total)
    for index, name in enumerate(names):
        assert cache.make_room(item(name), total)
        cache.allocate("a", index, item(name))
    return cache


def test_the_longest_idle_output_leaves_first_and_only_for_need():
    """What will be asked for again is thrown away, or nothing ever is."""
    cache = filled(12, "x", "y", "z")
    cache.free_item("a", 1)
    cache.free_item("a", 0)
    assert cache.take_evicted() == []
    assert cache.make_room(item("w", 3), 99)
    assert cache.take_evicted() == ["y"]
    assert cache.lookup("b", 0, item("x"))
    assert not cache.make_room(item("v", 5), 99), "x is held again"
    assert cache.take_evicted() == []


def test_a_repeated_item_is_held_until_its_last_occurrence_is_freed():
    """An output leaves while the same request still needs it further down its prompt."""
    cache = filled(8, "x")
    assert cache.lookup("a", 3, item("x", offset=90))
    cache.free_item("a", 0)
    assert cache.embeddings_idle == 0
    cache.free_item("a", 3)
    assert cache.embeddings_idle == 4


def test_an_output_that_came_back_is_not_reported_as_evicted():
    """The worker drops an output that the same step is about to fill."""
    cache = filled(4, "x")
    cache.free("a")
    assert cache.make_room(item("y"), 99)
    cache.allocate("b", 0, item("y"))
    cache.free("b")
    assert cache.make_room(item("x"), 99)
    cache.allocate("c", 0, item("x"))
    assert cache.take_evicted() == ["y"]
    assert cache.take_evicted() == []


def test_several_items_of_a_step_are_granted_together_or_the_rest_refused():
    """Two items are each granted the same room."""
    cache = EncoderCache(8)
    assert cache.make_room(item("x", 5), 99)
    assert not cache.make_room(item("y", 4), 99, embeddings_planned=5)
    assert cache.make_room(item("y", 3), 99, embeddings_planned=5)


def test_outputs_of_an_encoder_decoder_go_one_step_later():
    """The worker drops an output before the step that reads it has run."""
    cache = EncoderDecoderCache(8)
    cache.allocate("a", 0, item("x"))
    cache.free_passed("a", 0)
    assert cache.held("a") == [0]
    assert cache.take_evicted() == []
    cache.free_passed("a", 1)
    assert cache.embeddings_free == 8
    cache.allocate("b", 0, item("x"))
    assert cache.take_evicted() == ["x"]
    assert cache.take_evicted() == ["x"]
    assert cache.take_evicted() == []


def test_an_item_that_does_not_fit_cuts_the_request_before_it():
    """Tokens are computed from an embedding that nobody made."""
    items = [item("x", 6, offset=2), item("y", 6, offset=10)]
    cache = EncoderCache(10)
    plan = plan_encoding(cache, "a", items, 0, 30, compute_left=10)
    assert plan == EncodingPlan(new_tokens=10, compute_left=4, encode=(0,))
    carry_out(cache, "a", items, plan)
    assert plan_encoding(cache, "a", items, 10, 20, compute_left=10) == EncodingPlan(0, 10)
    cache.free_passed("a", 10)
    assert plan_encoding(cache, "a", items, 10, 20, compute_left=10).encode == (1,)
    assert cache.take_evicted() == ["x"]


def test_an_item_is_not_split_if_it_must_not_be():
    """A chunk ends inside an image whose tokens attend to each other in both directions."""
    items = [item("x", 6, offset=2)]
    whole = plan_encoding(EncoderCache(10), "a", items, 0, 5, compute_left=10, split_items=False)
    assert whole == EncodingPlan(2, 10)
    assert plan_encoding(EncoderCache(10), "a", items, 0, 5, compute_left=10) == EncodingPlan(5, 4, (0,))


def test_one_name_with_two_sizes_is_refused_and_nothing_is_encoded():
    """A request is given the embeddings of other content, of which there are too few."""
    items = [item("x", 4), item("x", 3, offset=4)]
    cache = EncoderCache(10)
    plan = plan_encoding(cache, "a", items, 0, 7, 10)
    assert (plan.new_tokens, plan.encode) == (0, ())
    assert re.search("item 1, 'x', has 3 embeddings, the output of that name has 4", plan.refused)
    carry_out(cache, "b", items, plan_encoding(cache, "b", items, 0, 4, 10))
    assert plan_encoding(cache, "a", items[1:], 0, 7, 10).refused


def test_a_plan_without_tokens_encodes_nothing_and_costs_nothing():
    """An item is encoded, held and paid for by a request that is not in the step."""
    items = [item("x", 4), item("y", 4, offset=4)]
    cache = EncoderCache(6)
    plan = plan_encoding(cache, "a", items, 0, 8, 9, lookahead_tokens=4)
    assert plan == EncodingPlan(0, 9), "the second does not fit, and the drafter reads into it"
    carry_out(cache, "a", items, plan)
    carry_out(cache, "a", items, EncodingPlan(0, 5, (0,)))
    assert (cache.held("a"), cache.embeddings_free) == ([], 6)


def test_items_of_an_encoder_decoder_may_lie_at_one_place():
    """Whisper with two sounds is refused, or items that follow each other are planned out of order."""
    items = [item("x"), item("y")]
    assert plan_encoding(EncoderDecoderCache(8), "a", items, 0, 1, 8).encode == (0, 1)
    with pytest.raises(UsageError, match="in order"):
        plan_encoding(EncoderDecoderCache(8), "a", [item("x", 2, 3), item("y", 2, 1)], 0, 1, 8)


def test_tokens_without_an_embedding_need_no_encoder():
    """An image is encoded a step too early, for its leading text."""
    items = [EncoderItem("x", 0, 10, 4, spans=((3, 5), (6, 8)))]
    cache = EncoderCache(10)
    assert plan_encoding(cache, "a", items, 0, 3, 10).encode == ()
    assert plan_encoding(cache, "a", items, 3, 1, 10).encode == (0,)
    assert plan_encoding(cache, "a", items, 8, 2, 10).encode == ()


# ---------------------------------------------------------------- misuse


def snapshot(cache):
    return json.dumps({name: value for name, value in vars(cache).items() if name != "_outputs"}, default=repr) + repr(
        getattr(cache, "_outputs", None)
    )


MISUSES = {
    "unknown request": (lambda c: c.free("nobody"), "'nobody' holds no item"),
    "unknown request's item": (lambda c: c.free_item("nobody", 0), "'nobody' does not hold item 0"),
    "unknown item": (lambda c: c.free_item("a", 7), r"does not hold item 7; it holds \[0\]"),
    "too large to make room": (lambda c: c.make_room(item("w", 9), 99), "9 embeddings never fit .* of 8"),
    "too large to plan": (
        lambda c: plan_encoding(c, "b", [item("x"), item("w", 9, 4)], 0, 20, 9),
        "9 embeddings never",
    ),
    "no room asked for": (lambda c: c.allocate("b", 0, item("w", 5)), "5 embeddings, 4 are free"),
    "another item": (lambda c: c.allocate("a", 0, item("w", 2)), "item 0 of request 'a' is"),
    "index": (lambda c: c.allocate("a", -1, item("w", 2)), "index is -1"),
    "stale plan": (lambda c: carry_out(c, "a", [item("w", 2)], EncodingPlan(1, 0, (0,))), "plan again"),
    "stale room": (lambda c: carry_out(c, "b", [item("w", 5)], EncodingPlan(1, 0, (0,))), "plan again"),
    "another prompt": (
        lambda c: plan_encoding(c, "a", [item("w", 2), item("v", 2, 2)], 0, 4, 9),
        "item 0 of request 'a' is",
    ),
    "no item": (lambda c: c.make_room("x", 9), "item is 'x'; pass an EncoderItem"),
    "no item to allocate": (lambda c: c.allocate("b", 0, None), "item is None"),
    "text for a budget": (lambda c: c.make_room(item("w"), "9"), "compute_left is '9'"),
    "negative budget": (lambda c: c.make_room(item("w"), -1), "compute_left is -1"),
    "negative plans": (lambda c: c.make_room(item("w"), 9, -50), "embeddings_planned is -50"),
    "no computed tokens": (lambda c: c.free_passed("a", None), "computed_tokens is None"),
    "of an unknown request": (lambda c: c.free_passed("nobody", 1.5), "computed_tokens is 1.5"),
    "negative distance": (lambda c: c.free_passed("a", 1, ahead_tokens=-9), "ahead_tokens is -9"),
    "no request": (lambda c: c.free_passed(["a"], 9), r"request id \['a'\]"),
    "no request to hold": (lambda c: c.allocate("", 0, item("w", 2)), "request id ''"),
    "no request to free": (lambda c: c.free(None), "request id None"),
    "no index": (lambda c: c.free_item("a", [0]), r"index is \[0\]"),
    "no items": (lambda c: plan_encoding(c, "b", None, 0, 2, 3), "items is None"),
    "strange items": (lambda c: plan_encoding(c, "b", ["x"], 0, 2, 3), "item is 'x'"),
    "items out of order": (
        lambda c: plan_encoding(c, "b", [item("w", 2, 6), item("v", 2, 2)], 0, 9, 9),
        "'v' begins at token 2.*in order",
    ),
    "no cache": (lambda c: plan_encoding(None, "b", [item("w")], 0, 2, 3), "cache is None"),
    "no flag": (lambda c: plan_encoding(c, "b", [item("w")], 0, 2, 3, split_items="no"), "split_items is 'no'"),
    "plan for more items": (lambda c: carry_out(c, "b", [item("w", 2)], EncodingPlan(1, 0, (3,))), "made for"),
    "plan for fewer items": (lambda c: carry_out(c, "b", [item("w", 2)], EncodingPlan(1, 0, (-1,))), "made for"),
    "plan twice": (lambda c: carry_out(c, "b", [item("w", 2)], EncodingPlan(1, 0, (0, 0))), "made for"),
    "repeats of nothing": (
        lambda c: carry_out(c, "b", [item("w", 2), item("v", 2, 2)], EncodingPlan(1, 0, (0,), (1,))),
        "made for",
    ),
    "no plan": (lambda c: carry_out(c, "b", [item("w", 2)], None), "plan is None"),
    "negative tokens": (lambda c: plan_encoding(c, "b", [item("x")], -1, 2, 3), "computed_tokens is -1"),
    "fraction of a token": (lambda c: plan_encoding(c, "b", [item("x")], 1, 2.5, 3), "new_tokens is 2.5"),
}
SHARED_MISUSES = {
    "no request to look up": (lambda c: c.lookup(None, 0, item("w")), "request id None"),
    "no index to look up": (lambda c: c.lookup("b", "0", item("w")), "index is '0'"),
    "other size": (lambda c: c.lookup("b", 0, item("x", 3)), "has 3 embeddings, the output kept has 4"),
    "allocated twice": (lambda c: c.allocate("b", 0, item("x")), "kept already; use lookup"),
    "stale output": (lambda c: carry_out(c, "b", [item("x")], EncodingPlan(1, 0, (0,))), "plan again"),
}


@pytest.mark.parametrize("case", [*MISUSES, *SHARED_MISUSES])
def test_misuse_is_refused_with_a_reason_and_changes_nothing(case):
    """A mistake of the scheduler's corrupts the cache, and shows up much later."""
    cache = filled(8, "x")
    call, reason = (MISUSES | SHARED_MISUSES)[case]
    before = snapshot(cache)
    with pytest.raises(UsageError, match=reason):
        call(cache)
    assert snapshot(cache) == before


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_of_the_other_cache_as_well(case):
    """The encoder-decoder cache takes what the shared one refuses."""
    cache = EncoderDecoderCache(8)
    cache.allocate("a", 0, item("x"))
    call, reason = MISUSES[case]
    before = snapshot(cache)
    with pytest.raises(UsageError, match=reason):
        call(cache)
    assert snapshot(cache) == before


@pytest.mark.parametrize("kind", KINDS.values())
def test_freeing_twice_is_refused(kind):
    """Room is given back twice, and more outputs are promised than fit."""
    cache = kind(8)
    cache.allocate("a", 0, item("x"))
    with pytest.raises(UsageError, match=r"kept already|holds item 0 already"):
        cache.allocate("a", 0, item("x"))
    cache.free_item("a", 0)
    for again in (lambda: cache.free_item("a", 0), lambda: cache.free("a")):
        with pytest.raises(UsageError):
            again()
    assert cache.check() == []


@pytest.mark.parametrize("total", [0, -1, 2.0, True, None])
def test_a_cache_needs_a_capacity(total):
    """A cache in which nothing fits makes every request wait for ever."""
    for kind in KINDS.values():
        with pytest.raises(UsageError, match="embeddings_total"):
            kind(total)


@pytest.mark.parametrize(
    "wrong",
    [
        ("", 0, 4, 4),
        (b"x", 0, 4, 4),
        ("x", -1, 4, 4),
        ("x", 0, 0, 0),
        ("x", 0, 4, 5),
        ("x", 0, 4, -1),
        ("x", 0, 4, 2, ((0, 1),)),
        ("x", 0, 4, 2, ((3, 5),)),
        ("x", 0, 4, 2, ((2, 3), (0, 1))),
        ("x", 0, 10, 10, (0, 10)),
        ("x", 0, 10, 10, ((0, 5, 10),)),
        ("x", 0, 10, 10, ((0,),)),
        ("x", 0, 10, 10, [(0, 10)]),
        ("x", 0, 10, 10, ([0, 10],)),
        ("x", 0, 10, 10, "ab"),
        ("x", 0, 10, 10, ("ab",)),
        ("x", 0, 10, 10, ((0.0, 10.0),)),
        ("x", 0, 10, 10, ((None, 10),)),
        ("x", 0, 10, 10, 5),
    ],
)
def test_an_item_that_contradicts_itself_is_refused(wrong):
    """An item is planned for that has more embeddings than tokens, or none where they are needed."""
    with pytest.raises(UsageError):
        EncoderItem(*wrong)


def test_a_refusal_that_lasts_is_said_when_the_request_comes():
    """A request waits for ever for room that the cache does not have, or is planned from items out of order."""
    budget = EncoderBudget.of(
        {"image": Modality(64, 2)}, EncoderLimits(encode_embeddings_max=1, cache_embeddings_max=100, **LIMITS)
    )
    budget.admit([item("x", 64)])
    with pytest.raises(UsageError, match="65 embeddings never fit in a step of 64"):
        budget.admit([item("x", 1), item("y", 65)])
    for wrong in (None, "x", [1]):
        with pytest.raises(UsageError, match="EncoderItem"):
            budget.admit(wrong)
    check_order([item("x", 4), item("y", 4, offset=4)])
    with pytest.raises(UsageError, match=r"'y' begins at token 3.*'x'.*ends at 4"):
        check_order([item("x", 4), item("y", 4, offset=3)])


def test_a_budget_of_other_things_is_refused():
    """A slip in the limits gives a traceback, or counts as yes."""
    sizes = {"encode_embeddings_max": 1, "cache_embeddings_max": 1, **LIMITS}
    with pytest.raises(UsageError, match="split_items is 'no'"):
        EncoderLimits(**sizes, split_items="no")
    for modalities in (None, [Modality(1, 1)], {"image": (1, 1)}):
        with pytest.raises(UsageError, match="mapping of names to Modality"):
            EncoderBudget.of(modalities, EncoderLimits(**sizes))
    with pytest.raises(UsageError, match="pass EncoderLimits"):
        EncoderBudget.of({}, sizes)


@pytest.mark.parametrize("damage", ["embeddings_free", "embeddings_idle", "_outputs", "_idle", "_indexes"])
def test_check_finds_what_is_wrong(damage):
    """The recount says that all is well when it is not."""
    cache = filled(12, "x", "y")
    cache.free_item("a", 0)
    if damage.startswith("embeddings"):
        setattr(cache, damage, getattr(cache, damage) + 1)
    else:
        getattr(cache, damage).clear()
    assert cache.check()


def test_the_example_in_the_document_runs(capsys):
    """The first thing that an engine's builder copies does not work."""
    text = (ROOT / "docs/encoder.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    for printed in capsys.readouterr().out.splitlines():
        assert f"`{printed}`" in text
