"""Part `transformers`: `generate()` through sessions whose slots lie beside the model.

Owns no state. The work is done by a module of the integration, which lies above this package and is loaded by name, for
only a check of everything may look up. Finds what `kvtier.integrations.transformers.card_check` says.
"""

import importlib

from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.record import Record, Skip
from kvtier.testing.gpu_check.torch_cuda import torch_on

CHECK = "kvtier.integrations.transformers.card_check"


def measure(card: Card, record: Record) -> None:
    torch = torch_on(card)
    try:
        module = importlib.import_module(CHECK)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise Skip("needs transformers, which is not installed") from None
    name = f"cuda:{card.number}"
    module.check(module.Place(name, name, torch.cuda.synchronize), card.scale, record)
