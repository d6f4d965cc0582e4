"""One value from the engine's thread to a caller who may be interrupted."""

import threading

import pytest

from kvtier.engine.oneshot import OneShot


def test_it_brings_the_value_or_the_error():
    """A verb returns nothing, or swallows its error."""
    value, error = OneShot(), OneShot()
    threading.Thread(target=value.send, args=(7,)).start()
    assert value.receive() == 7
    error.fail(KeyError("x"))
    with pytest.raises(KeyError):
        error.receive(1.0)


def test_the_sender_never_waits_for_a_receiver_that_gave_up():
    """An interrupted caller stops the engine for everybody."""
    value = OneShot()
    with pytest.raises(TimeoutError):
        value.receive(0.0)
    value.send(1)
    assert value.receive() == 1
