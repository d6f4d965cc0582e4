"""Turns the GGUF file into a float32 model that transformers loads in two seconds: `python -m ...convert GGUF FOLDER`.

Always: FOLDER appears whole, by one rename, or not at all; a conversion that was killed leaves an aside folder that
the next one removes. transformers refuses to save a model that it loaded from GGUF, so the dequantised weights are
put into a fresh one.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvtier.cli.demo.child import emit
from kvtier.cli.demo.weights import NAME, is_converted

ASIDE = ".converting-"


def convert(gguf: Path, folder: Path) -> None:
    """Read `gguf`, write the model and its tokenizer to `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(folder.parent)
    aside = folder.parent / f"{ASIDE}{os.getpid()}"
    aside.mkdir()
    try:
        emit({"step": "reading the weights"})
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        emit({"step": "reading the tokenizer"})
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(aside)
        emit({"step": "writing the model"})
        _unquantised(loaded).save_pretrained(aside)
        aside.rename(folder)
    except OSError:
        if not is_converted(folder):  # else another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unquantised(loaded: Any) -> LlamaForCausalLM:
    settings = loaded.config.to_dict()
    del settings["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**settings | {"_name_or_path": NAME}))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    return model


def _remove_left_over(parent: Path) -> None:
    for aside in parent.glob(f"{ASIDE}*"):
        if not Path("/proc", aside.name.removeprefix(ASIDE)).exists():
            shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
