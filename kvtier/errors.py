"""Every error that kvtier raises on purpose.

Not found, no room and "try later" are values, not errors (`kvtier.types`). A damaged block or a failing device
is an `Outcome` inside the engine and a miss outside of it. What is raised is either the user's to mend (the
message says what and how) or a bug of ours (`InvariantError`).
"""


class KvtierError(Exception):
    """Base of all errors raised by kvtier."""


class ConfigError(KvtierError):
    """A configuration that cannot work. `path` is the place in the YAML, such as ``tiers[1].capacity``."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}. {remedy}" if path else f"{problem}. {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


class UsageError(KvtierError):
    """A call that the contract forbids: a released lease, a slot of someone else, a key of the wrong length."""


class ClosedError(UsageError):
    """The cache was closed, or the handle was carried across a fork (use the spawn start method)."""


class Asleep(UsageError):
    """The fastest tier's memory is with the machine (`cache.sleep`): `cache.wake` brings it back."""


class StoreError(KvtierError):
    """A persistent store that cannot be opened. `path` is the store's folder."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}. {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


class StoreLocked(StoreError):
    """Another process (or another handle in this one) writes to the store: one writer per path."""


class StoreFormatError(StoreError):
    """The folder holds something that is not a store of a format this version reads."""


class BundleError(KvtierError):
    """A bundle that cannot be written, read or believed. `path` is its folder, or the file of it that is wrong."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}. {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


class CorruptBlock(KvtierError):
    """Stored bytes do not match their checksum or their envelope. The engine turns it into a miss."""


class OutOfMemory(KvtierError):
    """A memory driver has no physical memory left within its capacity."""


class DeviceLost(KvtierError):
    """The device of a tier failed for good: its slots hold nothing any more, while the tiers below go on serving."""


class DriverError(KvtierError):
    """A memory driver refused a call: `call` names it, `code` is its errno or CUresult."""

    def __init__(self, call: str, code: int, problem: str) -> None:
        super().__init__(f"{call}: {problem} ({code})")
        self.call = call
        self.code = code


class CudaError(DriverError):
    """The CUDA driver refused a call: `call` is its function, `code` the CUresult, `name` what CUDA calls that."""

    def __init__(self, call: str, code: int, name: str, problem: str) -> None:
        super().__init__(call, code, f"{name}, {problem}")
        self.name = name


class TraceError(KvtierError):
    """A trace that cannot be read: the message names the file, the line where there is one, and a remedy."""

    def __init__(self, file: str, line: int | None, problem: str, remedy: str) -> None:
        where = file if line is None else f"{file}, line {line}"
        super().__init__(f"{where}: {problem}. {remedy}")
        self.file = file
        self.line = line
        self.problem = problem
        self.remedy = remedy


class InvariantError(KvtierError):
    """A bug in kvtier: state that its own rules forbid. The tier stops; the host engine keeps serving."""


class PolicyFault(InvariantError):
    """A policy of another package failed, or does not keep its contract: the cache stops as after a bug."""

    def __init__(self, policy: str, verb: str, problem: str) -> None:
        remedy = "Mend it, or name another policy; kvtier.testing.policies.PolicyContract tests what one has to keep."
        super().__init__(f"policy {policy!r}: its `{verb}` {problem}. {remedy}")
