"""An entry of a registry: a name, and the module or bare record that says what it can do."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import SourceLoader
from importlib.util import find_spec
from types import ModuleType

from ..forward_mode import ForwardMode
from .capability import Capability, Carrier


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
        """What it can do, without importing the implementation."""
        found = self.record if self.module is None else _record_beside(self.module)
        assert found is not None, f"{self.name} has no record"
        assert found.name == self.name, f"the registry says {self.name}, its record {found.name}"
        return found


@cache
def _record_beside(module: str) -> Capability:
    """The constant CAPABILITY of a module below runtime/, evaluated alone.

    Running the module would import torch: seconds, and too early, since a plan decides what the
    environment must be before torch starts its threads.
    """
    spec = find_spec(f"..{module}", __package__)
    assert spec is not None and isinstance(spec.loader, SourceLoader), f"{module} has no source"
    for node in ast.parse(spec.loader.get_source(spec.name) or "").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CAPABILITY":
            code = compile(ast.Expression(node.value), spec.origin or module, "eval")
            names = {"Capability": Capability, "Carrier": Carrier, "ForwardMode": ForwardMode}
            return eval(code, names)
    raise AssertionError(f"{module} has no CAPABILITY")


def recorded(capability: Capability) -> Candidate:
    """A candidate that this version knows and cannot run: asking for it gets honest reasons."""
    assert not capability.built, f"{capability.name} is built: register its module"
    return Candidate(capability.name, record=capability)


def find(candidates: Sequence[Candidate], name: str) -> Candidate:
    """The candidate of that name; it must be registered."""
    return next(candidate for candidate in candidates if candidate.name == name)
