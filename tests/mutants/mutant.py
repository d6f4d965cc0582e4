"""`Mutant`: one bug that is planted on purpose, as a replacement of text.

Owns no file. Always: the text to be replaced occurs exactly once in its file, or the mutant does not apply.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """`file` is relative to the folder of the package; `why` says what goes wrong."""

    name: str
    file: str
    old: str
    new: str
    why: str

    def planted_in(self, source: str) -> str:
        """The source with the bug. Raises ValueError if it is not clear where it belongs."""
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its text occurs {found} times in {self.file}")
        return source.replace(self.old, self.new)

    def plant(self, package: Path) -> None:
        """Change a copy of the package."""
        file = package / self.file
        file.write_text(self.planted_in(file.read_text("utf-8")), "utf-8")
