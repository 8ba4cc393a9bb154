"""A card that answers no more ends the engine; one that has failed a step and still answers does
not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polypath.runtime.device_health import why_lost
from polypath.runtime.errors import EngineError
from polypath.tests.driving import build_engine, request

CUDA = torch.device("cuda")


class Card:
    """What `why_lost` asks of torch.cuda."""

    def __init__(self, error: str | None) -> None:
        self._error = error

    def synchronize(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)


def test_a_card_is_lost_when_waiting_for_it_fails() -> None:
    said = "CUDA error: an illegal memory access was encountered"
    assert why_lost(CUDA, Card(f"{said}\nCompile with ...")) == said
    assert why_lost(CUDA, Card("")) == "RuntimeError"
    assert why_lost(CUDA, Card(None)) is None
    assert why_lost(torch.device("cpu"), Card("never asked")) is None


@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_an_engine_whose_card_is_lost_ends_instead_of_failing_all_that_comes(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch, overlap_depth: int
) -> None:
    engine = build_engine(random_llama, pages=60, runner="eager", overlap_depth=overlap_depth)

    def fail(*args: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine.model, "forward", fail)
    monkeypatch.setattr("polypath.runtime.engine.why_lost", lambda device: "illegal access")
    engine.submit(request("a", [5, 6, 7], max_tokens=5))
    with pytest.raises(EngineError, match=r"the device answers no more \(illegal access\)"):
        engine.step()
