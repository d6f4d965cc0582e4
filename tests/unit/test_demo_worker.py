"""Both roles of the demo's worker on a tiny model: what they report, and that wrong KV would show."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.cli.cmd_config import as_yaml  # noqa: E402
from kvtier.cli.demo import ttft, worker  # noqa: E402
from kvtier.cli.demo.job import Filled, Job, Restored  # noqa: E402
from tests.tiny_llama import config_of, prompt_of, tiny_llama  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def model() -> Any:
    return tiny_llama()


def job_of(model: Any, folder: Path, role: str) -> Job:
    folder.mkdir(exist_ok=True)
    config = config_of(model, folder, gpu_blocks=16)
    (folder / "kvtier.yaml").write_text(as_yaml(config))
    prefix = prompt_of(40)
    prompts = [torch.cat([prefix, prompt_of(7, seed=seed)], dim=1)[0].tolist() for seed in (1, 2, 3)]
    return Job(role, "unused", str(folder / "kvtier.yaml"), prompts, newcomers=1, new_tokens=8, threads=1)


def test_the_second_role_gives_the_first_ones_tokens(model: Any, tmp_path: Path) -> None:
    """The demo would not show what it claims, or its figures would be of something else."""
    filled = worker.fill(job_of(model, tmp_path, "fill"), model)
    assert len(filled.cold) == len(filled.references) == 3
    assert filled.tokens == filled.references[:2]
    assert filled.written_blocks["gpu"] == 0
    restored = worker.restore(job_of(model, tmp_path, "restore"), model)
    assert [answer.tokens for answer in restored.answers] == filled.references
    assert [answer.tokens_restored for answer in restored.answers] == [44, 44, 40]
    first, _, newcomer = restored.answers
    assert first.tokens_by_tier == {"gpu": 0, "host": 0, "lmdb": 44}
    assert newcomer.tokens_by_tier["lmdb"] == 0
    for answer in restored.answers:
        assert answer.problem is None
        assert answer.restored.cpu_s > 0
        assert answer.floor.cpu_s > 0


def test_planted_wrong_blocks_change_the_answers(model: Any, tmp_path: Path) -> None:
    """The demo's comparison could not fail."""
    reference = worker.fill(job_of(model, tmp_path / "good", "fill"), model).references
    job = job_of(model, tmp_path / "bad", "restore")
    with kvtier.open_sync(job.config) as cache:
        keys = kvtier.hash_blocks(job.prompts[0], cache.config.model)
        lease = cache.reserve(cache.match(keys, owner="vandal"), blocks_total=11)
        for layer in range(3):
            for view in cache.kv(group=0, layer=layer).values():
                view[list(lease.slots(0))] = 0
        cache.commit(lease, list(zip(lease.slots(0), keys.groups[0], strict=True)))
        cache.release(lease)
        cache.flush()
    answers = worker.restore(job, model).answers
    assert answers[0].tokens_by_tier["lmdb"] == 44
    assert [answer.tokens for answer in answers] != reference


def test_a_whole_process_reads_its_job_and_writes_its_findings(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent would wait for files that never come."""
    model.save_pretrained(tmp_path / "model")
    job = job_of(model, tmp_path / "run", "fill")
    for role, kind in (("fill", Filled), ("restore", Restored)):
        job = Job(role, str(tmp_path / "model"), job.config, job.prompts, 1, 8, 1)
        job.write(tmp_path / "job.json")
        assert worker.main(str(tmp_path / "job.json"), str(tmp_path / "findings.json")) == 0
        assert kind.read(tmp_path / "findings.json")
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"step": ')]
        assert len(told) == job.steps  # else the bar would end early, or never
    assert told[-1] == '{"step": "question 3, from restored blocks"}'


def test_a_store_in_use_is_told_not_thrown(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user whose store is open elsewhere would see a traceback."""
    model.save_pretrained(tmp_path / "model")
    job = job_of(model, tmp_path / "run", "restore")
    Job("restore", str(tmp_path / "model"), job.config, job.prompts, 1, 8, 1).write(tmp_path / "job.json")
    with kvtier.open_sync(job.config):
        assert worker.main(str(tmp_path / "job.json"), str(tmp_path / "findings.json")) == 2
    assert '"error": ' in capsys.readouterr().out


def test_times_count_work_and_reads_only_devices(tmp_path: Path) -> None:
    """Figures would be taken from the wrong clock."""
    with ttft.Stopwatch() as watch:
        sum(range(100_000))
    assert watch.seconds.cpu_s > 0
    assert watch.seconds.wall_s > 0
    before = ttft.device_bytes_read()
    (tmp_path / "file").write_bytes(b"x" * 8192)
    (tmp_path / "file").read_bytes()  # from the page cache
    assert ttft.device_bytes_read() == before
