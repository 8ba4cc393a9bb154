"""Loads a planned attention backend; where its package cannot be used after all, says which."""

from __future__ import annotations

from ..build_context import BuildContext
from ..errors import EngineError
from ..planning.candidate import find
from . import registry
from .backend import AttentionBackend


class BackendUnusable(EngineError):
    """A backend that was planned does not load. `packages`: those it could have come from."""

    def __init__(self, message: str, packages: tuple[str, ...]) -> None:
        super().__init__(message)
        self.packages = packages


def load_backend(name: str, context: BuildContext) -> AttentionBackend:
    """The backend of that name. Raises BackendUnusable: what a package needs beside itself (a
    driver, another version of torch) shows only when it is imported.
    """
    candidate = find(registry.CANDIDATES, name)
    try:
        return candidate.load().build(context)
    except (ImportError, OSError, EngineError) as error:
        capability = candidate.capability
        named = (*capability.packages, *(carrier.package for carrier in capability.carriers))
        packages = tuple(text.partition(">")[0] for text in named)
        raise BackendUnusable(f"{name} does not load: {error}", packages) from error
