"""Standard output and standard error of the command, and how it ends when one of them cannot be written.

Always: a write that fails raises OutputLost, which is no OSError: no library takes it for trouble of its own (some
end with 1, which means findings here), and no verb for that of a disk. What is written after that goes nowhere, so
that the flush at exit does not complain once more.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

UNWRITABLE = 2  # like all that only the user can mend
PIPE_CLOSED = 141  # 128 + SIGPIPE


class OutputLost(Exception):
    """Nobody can be told anything any more on this stream. `code`: what the command ends with."""

    def __init__(self, stream: str, error: OSError) -> None:
        super().__init__(f"standard {stream} cannot be written: {error.strerror}; make room, or send it elsewhere")
        self.code = PIPE_CLOSED if isinstance(error, BrokenPipeError) else UNWRITABLE


@contextmanager
def guarded() -> Iterator[None]:
    """Run a command that prints. Raises SystemExit, with one line on stderr, if what it prints cannot be written."""
    usual = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _guarded("output", sys.stdout), _guarded("error", sys.stderr)
    try:
        try:
            yield
        finally:
            _flush()
    except OutputLost as lost:
        if lost.code == UNWRITABLE:
            with suppress(OutputLost):
                print(f"error: {lost}", file=sys.stderr, flush=True)
        raise SystemExit(lost.code) from None
    finally:
        sys.stdout, sys.stderr = usual


class _Descriptor(io.FileIO):
    """Someone else's file descriptor, which stays open."""

    def __init__(self, stream: str, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._stream = stream
        self._lost = False

    def write(self, data: Any, /) -> int:
        if self._lost:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._lost = True
            raise OutputLost(self._stream, error) from None


def _guarded(name: str, stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # closed by the shell (None), or replaced by who calls us
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(name, stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
