"""One process of the demo: `python -m kvtier.cli.demo.worker JOB FINDINGS`.

`fill` answers every question with stock transformers, for the cold times and the tokens to compare with, and through
kvtier, except the newcomers' questions. `restore` is another process, and has nothing but the store that `fill` left.
Always: no block of kvtier moves while cold times or floors are taken.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import kvtier
from kvtier.cli.demo import ttft
from kvtier.cli.demo.child import emit
from kvtier.cli.demo.job import Answer, Filled, Job, Restored
from kvtier.errors import ConfigError, StoreError, UsageError
from kvtier.integrations.transformers.session import PrefixSession

WARM_UP_TOKENS = 64  # one small forward before anything is timed: it touches all weights


def fill(job: Job, model: Any) -> Filled:
    """Answer everything with stock transformers, and all but the newcomers' questions through kvtier as well.

    When it returns, every block kept is in the store.
    """
    prompts = [torch.tensor([tokens]) for tokens in job.prompts]
    cold, references, answers = [], [], []
    for number, prompt in enumerate(prompts, 1):
        emit({"step": f"question {number}, cold"})
        cold.append(ttft.cold(model, prompt))
    with kvtier.open_sync(kvtier.load_config(job.config)) as cache:
        for number, prompt in enumerate(prompts, 1):
            if number <= len(prompts) - job.newcomers:
                emit({"step": f"question {number}, keeping its blocks"})
                answers.append(_kept(cache, model, prompt, job.new_tokens))
            # Blocks that nobody uses move down meanwhile, as they would between a server's requests.
            emit({"step": f"question {number}, with stock generate()"})
            references.append(_generated(model, prompt, job.new_tokens))
        tiers = cache.stats()["tiers"]
        emit({"step": "flushing to the store"})
        cache.flush()
    return Filled(cold, references, answers, {name: tiers[name]["written_blocks"] for name in tiers})


def restore(job: Job, model: Any) -> Restored:
    """Answer everything from what the store holds."""
    answers = []
    with kvtier.open_sync(kvtier.load_config(job.config)) as cache:
        for number, tokens in enumerate(job.prompts, 1):
            emit({"step": f"question {number}, from restored blocks"})
            answers.append(_measured(cache, model, torch.tensor([tokens]), job.new_tokens))
    return Restored(answers)


def _kept(cache: "kvtier.SyncCache", model: Any, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    with PrefixSession(cache, model, prompt, max_new_tokens=new_tokens) as session:
        tokens = _generated(model, prompt, new_tokens, **session.generate_kwargs)
        session.commit(torch.tensor([prompt[0].tolist() + tokens]))
    return tokens


def _measured(cache: "kvtier.SyncCache", model: Any, prompt: torch.Tensor, new_tokens: int) -> Answer:
    """Restore and compute the rest of the prompt, timed; then generate, keep, and measure the same prompt's floor."""
    device_bytes = ttft.device_bytes_read()
    with ExitStack() as stack:
        with ttft.Stopwatch() as watch:
            session = stack.enter_context(PrefixSession(cache, model, prompt))
            restored = session.tokens_restored
            ttft.first_token(model, prompt[:, restored:], session.past)
        device_bytes = ttft.device_bytes_read() - device_bytes
        in_ram = _copy_of(session.past, restored)
        session.past.crop(restored - prompt.shape[1])  # generate() computes its own first token
        tokens = _generated(model, prompt, new_tokens, **session.generate_kwargs)
    cache.flush()  # so that neither the floor nor the next question pays for this one's blocks
    floor = ttft.floor(model, prompt, in_ram)
    return Answer(tokens, watch.seconds, floor, restored, session.tokens_by_tier, device_bytes, session.problem)


def _copy_of(past: DynamicCache, tokens: int) -> DynamicCache:
    copy = DynamicCache()
    for layer, (k, v, _) in enumerate(past):
        copy.update(k[:, :, :tokens], v[:, :, :tokens], layer)
    return copy


def _generated(model: Any, prompt: torch.Tensor, new_tokens: int, **restored: Any) -> list[int]:
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, **restored
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


ROLES: dict[str, Callable[[Job, Any], Filled | Restored]] = {"fill": fill, "restore": restore}


def main(job_file: str, findings_file: str) -> int:
    """Returns 0, or 2 after telling the parent which of the user's settings cannot work."""
    job = Job.read(Path(job_file))
    torch.set_num_threads(job.threads)
    emit({"step": "loading the model"})
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    ttft.first_token(model.eval(), torch.tensor([job.prompts[0][:WARM_UP_TOKENS]]))
    try:
        ROLES[job.role](job, model).write(Path(findings_file))
    except (ConfigError, StoreError, UsageError) as error:
        emit({"error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
