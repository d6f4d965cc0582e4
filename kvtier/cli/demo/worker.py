"""One process of the demo: `python -m kvtier.cli.demo.worker JOB FINDINGS`.

`fill` answers every prompt with stock transformers, for the cold times and the tokens to compare with, and through
kvtier, except the newcomers' prompts. Then it flushes, keeps one more prompt and asks to be killed. `restore` is
another process, and has nothing but the store that `fill` left.
Always: no block of kvtier moves while cold times or floors are taken.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import kvtier
from kvtier.cli.demo import child, ttft
from kvtier.cli.demo.child import emit
from kvtier.cli.demo.job import Answer, Asked, Filled, Job, Restored
from kvtier.errors import ConfigError, StoreError, UsageError
from kvtier.integrations.transformers.session import PrefixSession

WARM_UP_TOKENS = 64  # one small forward before anything is timed: it touches all weights


def fill(job: Job, model: Any, findings: Path) -> None:
    """Write the findings, and then keep everything: when `child.await_kill` is called, all but the late prompt's
    blocks have been flushed, and those of the late prompt have just been committed.
    """
    stock = _stock(job, model)
    prompts, sweep = len(job.prompts), len(job.sweep)
    with kvtier.open_sync(kvtier.load_config(job.config)) as cache:
        kept = []
        for number, tokens in enumerate(job.prompts[: prompts - job.newcomers], 1):
            emit({"step": f"question {number}, keeping its blocks"})
            kept.append(_kept(cache, model, tokens, job.new_tokens))
        for tokens in job.sweep:
            emit({"step": f"{len(tokens)} tokens, keeping their blocks"})
            _kept(cache, model, tokens, 1)
        emit({"step": "one more prompt, keeping its blocks"})
        with _session(cache, model, job.late, job.late_new_tokens) as session:
            late = _generated(model, job.late, job.late_new_tokens, session)
            tiers = cache.stats()["tiers"]
            written = {name: tiers[name]["written_blocks"] for name in tiers}
            Filled(stock[:prompts], stock[prompts : prompts + sweep], stock[-1], kept, late, written).write(findings)
            emit({"step": "flushing to the store"})
            cache.flush()
            flushed_at = time.monotonic()
            session.commit(torch.tensor([job.late + late]))
            child.await_kill(flushed_at)


def restore(job: Job, model: Any, findings: Path) -> None:
    """Answer everything from what the store holds; for the sweep, each time with tiers that are empty above it."""
    config = kvtier.load_config(job.config)
    prompts, sweep = [], []
    with kvtier.open_sync(config) as cache:
        for number, tokens in enumerate(job.prompts, 1):
            emit({"step": f"question {number}, from restored blocks"})
            prompts.append(_measured(cache, model, tokens, job.new_tokens))
        emit({"step": "the prompt that was not flushed"})
        late = _measured(cache, model, job.late, job.late_new_tokens)
    for tokens in job.sweep:
        emit({"step": f"{len(tokens)} tokens, from restored blocks"})
        with kvtier.open_sync(config) as cache:
            sweep.append(_measured(cache, model, tokens, 1))
    Restored(prompts, sweep, late).write(findings)


def _stock(job: Job, model: Any) -> list[Asked]:
    """Every prompt of the job, cold."""
    answers = []
    for number, tokens in enumerate(job.prompts, 1):
        emit({"step": f"question {number}, cold"})
        answers.append(ttft.ask(model, torch.tensor([tokens]), job.new_tokens))
    for tokens in job.sweep:
        emit({"step": f"{len(tokens)} tokens, cold"})
        answers.append(ttft.ask(model, torch.tensor([tokens]), 1))
    emit({"step": "one more prompt, cold"})
    return [*answers, ttft.ask(model, torch.tensor([job.late]), job.late_new_tokens)]


def _kept(cache: "kvtier.SyncCache", model: Any, tokens: list[int], new_tokens: int) -> list[int]:
    # Blocks that nobody uses move down meanwhile, as they would between a server's requests.
    with _session(cache, model, tokens, new_tokens) as session:
        answer = _generated(model, tokens, new_tokens, session)
        session.commit(torch.tensor([tokens + answer]))
    return answer


def _session(cache: "kvtier.SyncCache", model: Any, tokens: list[int], new_tokens: int) -> PrefixSession:
    return PrefixSession(cache, model, torch.tensor([tokens]), max_new_tokens=new_tokens)


def _generated(model: Any, tokens: list[int], new_tokens: int, session: PrefixSession) -> list[int]:
    return ttft.ask(model, torch.tensor([tokens]), new_tokens, **session.generate_kwargs).tokens


def _measured(cache: "kvtier.SyncCache", model: Any, tokens: list[int], new_tokens: int) -> Answer:
    """Restore and generate, timed; then keep, and measure the same prompt's floor."""
    prompt = torch.tensor([tokens])
    device_bytes = ttft.device_bytes_read()
    with ExitStack() as stack:
        with ttft.Stopwatch() as load:
            session = stack.enter_context(PrefixSession(cache, model, prompt))
        asked = ttft.ask(model, prompt, new_tokens, **session.generate_kwargs)
        device_bytes = ttft.device_bytes_read() - device_bytes
        in_ram = _copy_of(session.past, session.tokens_restored)
    cache.flush()  # so that neither the floor nor the next question pays for this one's blocks
    floor = ttft.ask(model, prompt, 1, cache=in_ram).first
    return Answer(
        tokens=asked.tokens,
        load=load.seconds,
        forward=asked.first,
        floor=floor,
        tokens_restored=session.tokens_restored,
        tokens_by_tier=session.tokens_by_tier,
        device_bytes=device_bytes,
        problem=session.problem,
    )


def _copy_of(past: DynamicCache, tokens: int) -> DynamicCache:
    copy = DynamicCache()
    for layer, (k, v, _) in enumerate(past):
        copy.update(k[:, :, :tokens], v[:, :, :tokens], layer)
    return copy


ROLES: dict[str, Callable[[Job, Any, Path], None]] = {"fill": fill, "restore": restore}


def main(job_file: str, findings_file: str) -> int:
    """Returns 0, or 2 after telling the parent what only the user can mend."""
    job = Job.read(Path(job_file))
    torch.set_num_threads(job.threads)
    emit({"step": "loading the model"})
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    ttft.ask(model.eval(), torch.tensor([job.prompts[0][:WARM_UP_TOKENS]]), 1)
    try:
        ROLES[job.role](job, model, Path(findings_file))
    except (ConfigError, StoreError, UsageError, OSError) as error:
        emit({"error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
