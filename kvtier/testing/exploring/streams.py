"""`Coming`: copies that a device's stream has taken, and which a lease waits for on a stream of its own.

Owns nothing. Always: whoever has waited for it knows which slots are still to be filled; they are once its batch is
carried out, be that acknowledged or not. Units: slots.
"""

from typing import Any

from kvtier.testing.exploring.underway import Flying


class Coming:
    """Of one batch. A `kvtier.cache.leases.Arrival` whose streams are dicts, from slot to what fills it."""

    def __init__(self, flying: Flying) -> None:
        self._flying = flying

    @property
    def over(self) -> bool:
        """Whether it has come."""
        return self._flying.done is not None

    def wait(self, stream: Any, layer: int | None) -> None:
        """From now on kernels on this stream see those slots filled, and the caller knows of them."""
        if not self.over:
            stream.update({transfer.target_place: self for transfer in self._flying.batch.transfers})
