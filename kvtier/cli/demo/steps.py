"""The demo's child processes, one after the other, with a progress bar on a terminal.

Owns: the files of the demo's folder. Always: each step leaves its log there; a step that fails raises.
"""

from itertools import count
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.cmd_config import as_yaml
from kvtier.cli.demo import child, text, weights
from kvtier.cli.demo.job import Filled, Job, Restored
from kvtier.config import Config
from kvtier.errors import UsageError

CONFIG_FILE = "kvtier.yaml"
CONVERT_STEPS = 3

F = TypeVar("F", Filled, Restored)


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

    def answer_twice(self, prompts: list[text.Prompt], config: Config, threads: int) -> tuple[Filled, Restored]:
        """Both processes. Raises UsageError for a configuration that cannot work, StepFailed for a crash."""
        (self._folder / CONFIG_FILE).write_text(as_yaml(config))
        return (
            self._answer(Filled, "fill", "first process", prompts, threads),
            self._answer(Restored, "restore", "second process", prompts, threads),
        )

    def _answer(self, kind: type[F], role: str, title: str, prompts: list[text.Prompt], threads: int) -> F:
        job = Job(
            role=role,
            model=str(self._model_folder),
            config=str(self._folder / CONFIG_FILE),
            prompts=[list(prompt.tokens) for prompt in prompts],
            newcomers=text.NEWCOMERS,
            new_tokens=text.NEW_TOKENS,
            threads=threads,
        )
        job_file, findings_file = self._folder / f"{role}-job.json", self._folder / f"{role}.json"
        job.write(job_file)
        self._run("worker", role, title, [str(job_file), str(findings_file)], job.steps)
        return kind.read(findings_file)

    def _run(self, module: str, name: str, title: str, arguments: list[str], steps: int) -> None:
        log = self._folder / f"{name}.log"
        errors: list[str] = []
        begun = count()
        console = Console(stderr=True)
        columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(title, total=steps)

            def told(event: child.Event) -> None:
                if "error" in event:
                    errors.append(event["error"])
                else:
                    # The step has only begun: the bar shows what is behind it.
                    progress.update(task, completed=next(begun), description=f"{title}: {event['step']}")

            status = child.run(f"kvtier.cli.demo.{module}", arguments, log, told)
        if errors:
            raise UsageError(errors[0])
        if status:
            raise StepFailed(f"{title} failed ({status}): {child.last_words(log)}")
