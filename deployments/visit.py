"""One worker's part in an answer, and what changed when the next one took it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .served_worker import CLASS_FIELDS

if TYPE_CHECKING:
    from .served_worker import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One worker that had the answer: where it took it up, and why it went on elsewhere."""

    worker: Worker
    position: int  # index of the first token that it was to make
    left_because: str | None = None  # None: it ended the answer, or still has it

    def to_json(self, before: Visit) -> dict[str, Any]:  # JSON
        """For `polypath.resumed`: a change of worker, and what changed with it."""
        old, new = before.worker, self.worker
        return {
            "from": old.id,
            "to": new.id,
            "position": self.position,
            "because": before.left_because,
            "changed": changes(old, new),
        }


def changes(old: Worker, new: Worker) -> dict[str, list[object]]:
    """What of the class differs between two workers: field -> [old, new]; empty: the same class."""
    pairs = zip(CLASS_FIELDS, old.resume_class, new.resume_class, strict=True)
    return {name: [before, after] for name, before, after in pairs if before != after}
