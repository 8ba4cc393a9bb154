"""An entry of a registry: a name, and the module or bare record that says what it can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from .capability import Capability


@dataclass(frozen=True, slots=True)
class Candidate:
    """A `module` below runtime/ that has a CAPABILITY, imported on first use; or a `record`."""

    name: str
    module: str | None = None
    record: Capability | None = None

    def __post_init__(self) -> None:
        assert (self.module is None) != (self.record is None), f"{self.name}: module or record"

    def load(self) -> ModuleType:
        """The module with the implementation; only for what is built."""
        assert self.module is not None, f"{self.name} is recorded but not built in this version"
        return import_module(f"..{self.module}", __package__)

    @property
    def capability(self) -> Capability:
        """What it can do."""
        found = self.record if self.record is not None else self.load().CAPABILITY
        assert found.name == self.name, f"the registry says {self.name}, its record {found.name}"
        return found


def recorded(capability: Capability) -> Candidate:
    """A candidate that this version knows and cannot run: asking for it gets honest reasons."""
    assert not capability.built, f"{capability.name} is built: register its module"
    return Candidate(capability.name, record=capability)


def find(candidates: Sequence[Candidate], name: str) -> Candidate:
    """The candidate of that name; it must be registered."""
    return next(candidate for candidate in candidates if candidate.name == name)
