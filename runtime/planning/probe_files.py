"""Reading the kernel's small text files: what is missing or forbidden is a note, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class FactFiles:
    """Files under `root` ("/" but in tests), with the notes that reading them left behind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        """Keep a sentence once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def path(self, name: str) -> Path:
        """Where the absolute path `name` lies under the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str, missing: str | None = None) -> str | None:
        """Text of a file, or None. That it is not there is noted only as the sentence `missing`."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            if missing is not None:
                self.note(f"{missing} ({name} is not there)")
        except OSError as error:
            self.note(f"{name} could not be read: {error.strerror or error}")
        return None

    def read_int(self, name: str) -> int | None:
        """The number a file holds; anything else is None with a note, but `max` without one."""
        return self.parse(name, self.read(name), int)

    def names(self, name: str) -> list[str] | None:
        """Names in a folder, sorted, or None where it cannot be listed."""
        try:
            return sorted(path.name for path in self.path(name).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.note(f"{name} could not be listed: {error.strerror or error}")
            return None

    def parse(self, name: str, text: str | None, parser: Callable[[str], T]) -> T | None:
        """`parser(text)`, or None with a note where the text is not what it should be."""
        if text is None or text.strip() in ("", "max"):
            return None
        try:
            return parser(text.strip())
        except (ValueError, IndexError):
            self.note(f"{name} holds {text.strip()[:40]!r}, which Polypath does not understand")
            return None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Linux's list form: "0-2,5" is (0, 1, 2, 5); "" is ()."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if first:
            numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(sorted(set(numbers)))
