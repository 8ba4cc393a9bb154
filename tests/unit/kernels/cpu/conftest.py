"""The native kernels under test, one run for each build that this CPU can run."""

from __future__ import annotations

import pytest

from polypath.kernels.cpu.library import Library, load
from polypath.kernels.cpu.variants import built_variants, fitting_variants
from polypath.runtime.planning.probe import probe

FITTING = [v for v in fitting_variants(probe().cpu.isa) if v in built_variants()]
MISSING = pytest.param(None, marks=pytest.mark.skip("no build of the kernels fits this CPU"))


@pytest.fixture(scope="session", params=FITTING or [MISSING])
def library(request: pytest.FixtureRequest) -> Library:
    """One build, with two threads."""
    found = load(request.param)
    found.quick["pp_set_threads"](2)
    return found
