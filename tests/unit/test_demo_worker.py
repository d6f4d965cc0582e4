"""Both roles of the demo's worker on a tiny model: what they report, and that wrong KV would show."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.cli.cmd_config import as_yaml  # noqa: E402
from kvtier.cli.demo import child, ttft, worker  # noqa: E402
from kvtier.cli.demo.job import Asked, Filled, Job, Restored, Seconds  # noqa: E402
from tests.tiny_llama import config_of, prompt_of, tiny_llama  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def model() -> Any:
    return tiny_llama()


@pytest.fixture(autouse=True)
def survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process asks to be killed, too, and goes on as if its parent had gone."""
    monkeypatch.setattr(child, "await_kill", lambda since: None)


def job_of(model: Any, folder: Path, role: str) -> Job:
    folder.mkdir(exist_ok=True)
    config = config_of(model, folder, gpu_blocks=32)
    (folder / "kvtier.yaml").write_text(as_yaml(config))
    long, short = [prompt_of(40)[0, :length].tolist() for length in (40, 20)]
    ends = [prompt_of(7, seed=seed)[0].tolist() for seed in (1, 2, 3)]
    sweep = [short + end for end in ends[:2]]
    if role == "restore":
        sweep += [long + end for end in ends[:2]]
    return Job(
        role=role,
        model="unused",
        config=str(folder / "kvtier.yaml"),
        prompts=[long + end for end in ends],
        newcomers=1,
        new_tokens=8,
        sweep=sweep,
        late=prompt_of(22, seed=9)[0].tolist(),
        late_new_tokens=4,
        threads=1,
    )


def filled_by(job: Job, model: Any) -> Filled:
    file = Path(job.config).with_name("fill.json")
    worker.fill(job, model, file)
    return Filled.read(file)


def restored_by(job: Job, model: Any) -> Restored:
    file = Path(job.config).with_name("restore.json")
    worker.restore(job, model, file)
    return Restored.read(file)


def test_the_second_role_gives_the_first_ones_tokens(model: Any, tmp_path: Path) -> None:
    """The demo would not show what it claims, or its figures would be of something else."""
    filled = filled_by(job_of(model, tmp_path, "fill"), model)
    references = [asked.tokens for asked in filled.prompts]
    assert len(references) == 3
    assert filled.kept == references[:2]
    assert filled.late_kept == filled.late.tokens
    assert filled.written_blocks["gpu"] == 0
    restored = restored_by(job_of(model, tmp_path, "restore"), model)
    assert [answer.tokens for answer in restored.prompts] == references
    assert [answer.tokens_restored for answer in restored.prompts] == [44, 44, 40]
    first, _, newcomer = restored.prompts
    assert first.tokens_by_tier == {"gpu": 0, "host": 0, "lmdb": 44}
    assert newcomer.tokens_by_tier["lmdb"] == 0
    for answer in restored.prompts:
        assert answer.problem is None
        assert answer.load.cpu_s > 0
        assert answer.restored.cpu_s == answer.load.cpu_s + answer.forward.cpu_s
        assert answer.floor.cpu_s > 0


def test_each_answer_of_the_sweep_comes_from_the_store(model: Any, tmp_path: Path) -> None:
    """The curve would be of what a tier above had already, and too good."""
    filled = filled_by(job_of(model, tmp_path, "fill"), model)
    assert [len(asked.tokens) for asked in filled.sweep] == [1, 1]
    sweep = restored_by(job_of(model, tmp_path, "restore"), model).sweep
    assert [answer.tokens_by_tier for answer in sweep] == [
        {"gpu": 0, "host": 0, "lmdb": tokens} for tokens in (24, 24, 44, 44)
    ]
    assert [answer.tokens for answer in sweep[:2]] == [asked.tokens for asked in filled.sweep]
    assert [answer.tokens for answer in sweep[2:]] == [asked.tokens[:1] for asked in filled.prompts[:2]]


def test_the_kill_is_asked_for_between_flush_and_the_late_prompts_blocks(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof would be of nothing flushed, or of nothing left to lose."""
    seen: list[str] = []
    flush, commit = kvtier.SyncCache.flush, worker.PrefixSession.commit
    monkeypatch.setattr(kvtier.SyncCache, "flush", lambda *a, **k: (flush(*a, **k), seen.append("flushed")))
    monkeypatch.setattr(worker.PrefixSession, "commit", lambda *args: seen.append(f"{commit(*args)} committed"))
    monkeypatch.setattr(child, "await_kill", lambda since: seen.append("kill"))
    filled_by(job_of(model, tmp_path, "fill"), model)
    assert seen[seen.index("flushed") :][:3] == ["flushed", "24 committed", "kill"]
    assert seen.index("flushed") > 4


def test_planted_wrong_blocks_change_the_answers(model: Any, tmp_path: Path) -> None:
    """The demo's comparison could not fail."""
    filled = filled_by(job_of(model, tmp_path / "good", "fill"), model)
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
    answers = restored_by(job, model).prompts
    assert answers[0].tokens_by_tier["lmdb"] == 44
    assert [answer.tokens for answer in answers] != [asked.tokens for asked in filled.prompts]


def test_a_whole_process_reads_its_job_and_writes_its_findings(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent would wait for files that never come."""
    model.save_pretrained(tmp_path / "model")
    for role, kind in (("fill", Filled), ("restore", Restored)):
        job = replace(job_of(model, tmp_path / "run", role), model=str(tmp_path / "model"))
        job.write(tmp_path / "job.json")
        assert worker.main(str(tmp_path / "job.json"), str(tmp_path / "findings.json")) == 0
        assert kind.read(tmp_path / "findings.json")
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"step": ')]
        assert len(told) == job.steps  # else the bar would end early, or never
    assert told[-1] == '{"step": "47 tokens, from restored blocks"}'


def test_a_store_in_use_is_told_not_thrown(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user whose store is open elsewhere would see a traceback."""
    model.save_pretrained(tmp_path / "model")
    job = job_of(model, tmp_path / "run", "restore")
    replace(job, model=str(tmp_path / "model")).write(tmp_path / "job.json")
    with kvtier.open_sync(job.config):
        assert worker.main(str(tmp_path / "job.json"), str(tmp_path / "findings.json")) == 2
    assert '"error": ' in capsys.readouterr().out


def test_a_full_disk_is_told_not_thrown(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user would see a traceback of ours for a disk of theirs."""
    model.save_pretrained(tmp_path / "model")
    replace(job_of(model, tmp_path / "run", "fill"), model=str(tmp_path / "model")).write(tmp_path / "job.json")

    def no_room(findings: Filled, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Filled, "write", no_room)
    assert worker.main(str(tmp_path / "job.json"), str(tmp_path / "findings.json")) == 2
    assert "No space left on device: " in capsys.readouterr().out


def test_the_watch_stops_at_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to first token would be nothing, or that of the whole answer."""
    now = 0.0
    clocks = SimpleNamespace(process_time=lambda: now, perf_counter=lambda: 2 * now)
    monkeypatch.setattr(ttft, "time", clocks)

    class Slow:
        def generate(self, prompt: Any, streamer: Any, **_: Any) -> Any:
            """As transformers does, hands out the prompt and then each token; a second passes before each."""
            nonlocal now
            for value in (prompt, *torch.tensor([[5], [6], [7]])):
                now += 1
                streamer.put(value)
            streamer.end()
            return torch.cat([prompt, torch.tensor([[5, 6, 7]])], dim=1)

    asked = ttft.ask(Slow(), torch.tensor([[1, 2]]), 3)
    assert asked == Asked([5, 6, 7], Seconds(2.0, 4.0))


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
