"""docs/paths.md names what exists: every reason, every runner, the metric."""

from __future__ import annotations

from pathlib import Path

from polypath.runtime.runners import registry
from polypath.runtime.runners.runner import Reason

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_names_every_reason_and_runner() -> None:
    page = (ROOT / "docs" / "paths.md").read_text()
    for name in [*Reason, *(candidate.name for candidate in registry.CANDIDATES)]:
        assert f"`{name}`" in page, name


def test_the_metric_that_the_page_names_exists() -> None:
    sources = (path.read_text() for path in (ROOT / "deployments").glob("*.py"))
    assert any("polypath_worker_steps" in source for source in sources)
