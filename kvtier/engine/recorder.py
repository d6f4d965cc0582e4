"""`TraceRecorder`: writes requests to a file that `kvtier simulate` reads, on a thread of its own.

    {"kvtier_trace": 1, "block_tokens": 16, "block_bytes": 737280, "model": "32 hex digits",
     "began": unix time in ms, when the file was begun}
    {"t": seconds since then, "in": tokens, "out": tokens, "ids": ["32 hex digits", ...], "session": "32 hex digits"}
    {"t": seconds since then, "session": "32 hex digits", "hint": {"ends": true}}    or any other of `cache.hint`

Owns: the file, a queue and the thread between. No token is written: a block is named by the start of its hash, or,
with a salt, by a keyed hash of that, from which nobody without the salt can tell that he knows a prompt. A session is
named by a hash, keyed alike; a request without one has no such field. "model" names the namespace, by the start of its
fingerprint, keyed alike: a block's name does not tell of which model it is. A request under another one than the
header's (the weights have changed since) names its own.
Always:  mode 0600; lines are whole, also after a failed write; what a killed process left of a line is cut off when the
         file is opened again. A file that is full, or of another namespace or salt, is set aside as PATH.1 and begun
         anew, so that both take at most twice `bytes_max`. What cannot be written is lost and counted, and never
         waited for.
Units:   seconds of the engine's clock, bytes.
"""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

from kvtier.engine.hints import words_of
from kvtier.engine.traced import Asked, Said
from kvtier.errors import ConfigError
from kvtier.notices import say_once
from kvtier.types import GROUP_BYTES, BlockKey

QUEUED_MAX = 4096  # requests and hints that wait for the disk
TOGETHER_MAX = 256  # of them written at once
NAME_BYTES = 16
MODE = 0o600
_TAIL_BYTES = 1 << 16

log = logging.getLogger("kvtier")


class TraceRecorder:
    """A `Recorder`. `close` writes what is waiting."""

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        block_bytes: int,
        namespace: bytes,
        *,
        epoch_ms: int = 0,
        now_s: float = 0.0,
        salt: str | None = None,
        bytes_max: int = 1 << 30,
    ) -> None:
        """namespace: the fingerprint of the model whose blocks are named. epoch_ms: the wall clock's time when the
        engine's clock is at 0. now_s: the engine's clock.

        Raises ConfigError if the file cannot be written.
        """
        self._path = path
        self._namespace = namespace
        self._salt = None if salt is None else salt.encode()
        self._shape: dict[str, Any] = {"kvtier_trace": 1, "block_tokens": block_tokens, "block_bytes": block_bytes}
        self._shape["model"] = self._model(namespace)
        self._epoch_ms = epoch_ms
        self._bytes_max = bytes_max
        self._lost = 0
        self._lost_lock = threading.Lock()
        self._queue: Queue[Asked | Said | None] = Queue(QUEUED_MAX)
        self._file = -1
        self._size_bytes = 0
        self._began_ms = 0
        try:
            self._open(now_s)
        except OSError as error:
            self._close_file()
            why = "another cache writes it" if isinstance(error, BlockingIOError) else error.strerror or error
            remedy = "Name a file of its own in a folder that you may write to."
            raise ConfigError("trace.record", f"{path} cannot be written: {why}", remedy) from error
        self._thread = threading.Thread(target=self._run, name="kvtier-trace", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from the engine's thread

    def note(self, entry: Asked | Said) -> int:
        """Take a request or a hint. Returns how many were lost since the last call."""
        try:
            self._queue.put_nowait(entry)
        except Full:
            self._lose(1)
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        """Write what waits, and end. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._close_file()

    # ------------------------------------------------------------ on its own thread

    def _run(self) -> None:
        going = True
        while going:
            batch = [self._queue.get()]
            try:
                while len(batch) < TOGETHER_MAX:
                    batch.append(self._queue.get_nowait())
            except Empty:
                pass
            going = None not in batch
            if entries := [entry for entry in batch if entry is not None]:
                self._write(entries)

    def _write(self, batch: Sequence[Asked | Said]) -> None:
        try:
            if self._file < 0 or self._size_bytes > self._bytes_max:
                self._open(batch[0].at_s)
            self._append("".join(map(self._line, batch)).encode())
        except OSError as error:
            self._lose(len(batch))
            self._close_file()  # and try anew with the next
            say_once(log, str(self._path), "trace", f"requests are not recorded: {error.strerror or error}")

    def _line(self, entry: Asked | Said) -> str:
        at_s = max(0.0, entry.at_s + (self._epoch_ms - self._began_ms) / 1000)
        line: dict[str, Any] = {"t": round(at_s, 6)}
        if isinstance(entry, Asked):
            names = [self._name(key) for key in entry.keys]
            line |= {"in": entry.tokens_in, "out": entry.tokens_out, "ids": names}
            if entry.namespace != self._namespace:
                line["model"] = self._model(entry.namespace)
        if entry.session is not None:
            line["session"] = self._session(entry.session)
        if isinstance(entry, Said):
            line["hint"] = words_of(entry.advice)
        return json.dumps(line, separators=(",", ":")) + "\n"

    def _model(self, namespace: bytes) -> str:
        if self._salt is not None:
            return blake2b(namespace, digest_size=NAME_BYTES, key=self._salt, person=b"model").hexdigest()
        return namespace[:NAME_BYTES].hex()

    def _session(self, name: str) -> str:
        data = name.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=NAME_BYTES, key=self._salt or b"", person=b"session").hexdigest()

    def _name(self, key: BlockKey) -> str:
        block_hash = key[:-GROUP_BYTES]
        if self._salt is not None:
            return blake2b(block_hash, digest_size=NAME_BYTES, key=self._salt).hexdigest()
        return block_hash[:NAME_BYTES].hex()

    def _lose(self, requests: int) -> None:
        with self._lost_lock:
            self._lost += requests

    # ------------------------------------------------------------ the file

    def _open(self, now_s: float) -> None:
        """Go on with the file that is there, if it has room and names blocks as we do; else begin one now."""
        self._close_file()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two who write would cut each other's lines
        os.fchmod(self._file, MODE)
        self._size_bytes = self._whole_bytes()
        began_ms = self._began() if 0 < self._size_bytes <= self._bytes_max else None
        if began_ms is None and self._size_bytes:
            self._close_file()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open(now_s)
        elif began_ms is not None:
            os.ftruncate(self._file, self._size_bytes)
            self._began_ms = began_ms
        else:
            os.ftruncate(self._file, 0)
            self._began_ms = self._epoch_ms + int(now_s * 1000)  # the engine's clock itself counts from a boot
            self._append(json.dumps(self._shape | {"began": self._began_ms}).encode() + b"\n")

    def _began(self) -> int | None:
        """When the recording in the file began; None if it is none of ours, or of other blocks."""
        try:
            line = json.loads(os.pread(self._file, _TAIL_BYTES, 0).split(b"\n")[0])
            began_ms = line.pop("began")
        except (ValueError, AttributeError, KeyError, TypeError):
            return None
        return began_ms if line == self._shape and type(began_ms) is int else None

    def _whole_bytes(self) -> int:
        """How long the file is without what a killed process left of its last line."""
        end = os.fstat(self._file).st_size
        while end:
            start = max(0, end - _TAIL_BYTES)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def _append(self, data: bytes) -> None:
        """All of it, or nothing."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, self._size_bytes)
            raise
        self._size_bytes += written

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
