"""The demo's child processes, one after the other, with a progress bar on a terminal.

Owns: the files of the demo's folder. Always: each step leaves its log there; a step that fails raises; the first
process that answers ends by SIGKILL, the second by itself.
"""

import shutil
import signal
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.cmd_config import as_yaml
from kvtier.cli.demo import child, text, weights
from kvtier.cli.demo.job import Filled, Job, Restored
from kvtier.config import Config
from kvtier.errors import UsageError

CONFIG_FILE = "kvtier.yaml"
CONVERT_STEPS = 3
FREE_BYTES_MIN = 1 << 20


class StepFailed(Exception):
    """A child process ended for a reason that is not the user's to mend."""


class Steps:
    """Runs what the demo needs in `folder`."""

    def __init__(self, folder: Path, model_folder: Path) -> None:
        self._folder = folder
        self._model_folder = model_folder

    def convert(self) -> None:
        """Make the model, if it is not there yet. Takes about 40 s, once."""
        if not weights.is_converted(self._model_folder):
            gguf = weights.gguf_file()
            assert gguf is not None  # missing_installs has seen it
            title = f"converting {weights.NAME}, once"
            self._run("convert", "convert", title, [str(gguf), str(self._model_folder)], CONVERT_STEPS)

    def fill(self, asks: text.Asks, config: Config, threads: int) -> tuple[Filled, float]:
        """The first process, which is killed; also how many seconds after its flush had returned.

        Raises UsageError for what only the user can mend, StepFailed for a crash.
        """
        (self._folder / CONFIG_FILE).write_text(as_yaml(config))
        findings, killed_after_s = self._answer("fill", "first process", asks, asks.sweep_shorter, threads)
        if killed_after_s is None:
            raise StepFailed("first process ended before it could be killed")
        return Filled.read(findings), killed_after_s

    def restore(self, asks: text.Asks, threads: int) -> Restored:
        """The second process, with the configuration of the first. Raises as `fill` does."""
        findings, _ = self._answer("restore", "second process", asks, asks.sweep, threads)
        return Restored.read(findings)

    def _answer(
        self, role: str, title: str, asks: text.Asks, sweep: Sequence[text.Prompt], threads: int
    ) -> tuple[Path, float | None]:
        job = Job(
            role=role,
            model=str(self._model_folder),
            config=str(self._folder / CONFIG_FILE),
            prompts=[list(prompt.tokens) for prompt in asks.prompts],
            newcomers=text.NEWCOMERS,
            new_tokens=text.NEW_TOKENS,
            sweep=[list(prompt.tokens) for prompt in sweep],
            late=list(asks.late.tokens),
            late_new_tokens=text.LATE_NEW_TOKENS,
            threads=threads,
        )
        job_file, findings_file = self._folder / f"{role}-job.json", self._folder / f"{role}.json"
        job.write(job_file)
        return findings_file, self._run("worker", role, title, [str(job_file), str(findings_file)], job.steps)

    def _run(self, module: str, name: str, title: str, arguments: list[str], steps: int) -> float | None:
        """Returns None if the child ended well, or, if it asked to be killed and was, how soon."""
        log = self._folder / f"{name}.log"
        told: list[child.Event] = []
        begun = count()
        console = Console(stderr=True)
        columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(title, total=steps)

            def tell(event: child.Event) -> None:
                if "step" in event:
                    # The step has only begun: the bar shows what is behind it.
                    progress.update(task, completed=next(begun), description=f"{title}: {event['step']}")
                else:
                    told.append(event)

            status = child.run(f"kvtier.cli.demo.{module}", arguments, log, tell)
        found = {key: value for event in told for key, value in event.items()}
        if "error" in found:
            raise UsageError(found["error"])
        if status != (-signal.SIGKILL if "killed_after_s" in found else 0):
            self._check_disk()
            raise StepFailed(f"{title} failed ({status}): {child.last_words(log)}")
        return found.get("killed_after_s")

    def _check_disk(self) -> None:
        """A child that had no room left for its log could not say so. Raises UsageError if that may be why."""
        if shutil.disk_usage(self._folder).free < FREE_BYTES_MIN:
            raise UsageError(f"no space is left on the disk of {self._folder}; name a folder elsewhere with --out")
