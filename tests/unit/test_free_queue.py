"""FreeQueue against a plain list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.allocator.free_queue import FreeQueue
from kvtier.allocator.rings import INDEX_MAX
from kvtier.errors import InvariantError

VERBS = ["push_back", "push_front", "remove", "move_to_back", "pop_front"]


def model_step(model: list[int], verb: str, index: int) -> int | None:
    """The same verb on a list; raises ValueError where the queue must refuse."""
    if verb == "pop_front":
        return model.pop(0) if model else None
    if verb in ("push_back", "push_front"):
        if index in model:
            raise ValueError
        model.insert(len(model) if verb == "push_back" else 0, index)
        return None
    model.remove(index)
    if verb == "move_to_back":
        model.append(index)
    return None


@given(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 20))), st.integers(0, 10))
def test_it_keeps_the_order_of_a_list(steps: list[tuple[str, int]], room: int) -> None:
    """Slots or handles leave in the wrong order, or twice."""
    queue, model = FreeQueue(room), []
    for verb, index in steps:
        arguments = () if verb == "pop_front" else (index,)
        try:
            expected = model_step(model, verb, index)
        except ValueError:
            with pytest.raises(InvariantError):
                getattr(queue, verb)(*arguments)
        else:
            assert getattr(queue, verb)(*arguments) == expected
        assert list(queue) == model
        assert len(queue) == len(model)
        assert [index in queue for index in range(25)] == [index in model for index in range(25)]
        assert queue.check() == []


def test_it_grows_and_refuses_what_is_no_index() -> None:
    """A large handle is lost, or -1 means the last member."""
    queue = FreeQueue()
    queue.push_back(100_000)
    queue.push_back(3)
    assert list(queue) == [100_000, 3]
    assert queue.check() == []
    for index in (-1, INDEX_MAX + 1):
        assert index not in queue
        with pytest.raises(InvariantError):
            queue.push_back(index)
        with pytest.raises(InvariantError):
            queue.remove(index)
    assert "3" not in queue
