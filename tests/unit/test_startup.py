"""Start-up: what the self-check refuses is taken out, said, and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polypath.runtime import self_check, startup
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine
from polypath.runtime.errors import EngineError
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.request import SamplingParams
from polypath.tests.driving import YARDSTICK, build_yardstick

PLAIN = "eager+torch_sdpa+torch"
needs_native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


@pytest.fixture
def broken_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native attention answers with noise."""
    from polypath.runtime.attention.cpu_native import CpuNativeBackend

    def attend(self: object, q: torch.Tensor, kv: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.randn_like(q)

    monkeypatch.setattr(CpuNativeBackend, "attend", attend)


@needs_native
def test_a_path_that_fails_the_self_check_is_replaced_by_the_plain_one(
    random_llama: Path, broken_native: None
) -> None:
    stages: list[str] = []
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20)
    engine = Engine.build(config, on_progress=lambda event: stages.append(event.stage))
    assert {engine.plan.path_name(mode) for mode in engine.plan.paths} == {PLAIN}
    assert engine.plan.linear_method == "dense"
    first, second = engine.plan.events
    assert "cpu_native" in first.message and "was taken out" in first.message
    assert "agrees with a plain forward" in second.message
    assert engine.plan.origins["ops"] == "hardware", "nobody asked for it"
    assert stages.count("plan") == 2
    prompt = [5, 6, 7]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (answer,) = engine.generate([prompt], greedy)
    (expected,) = build_yardstick(random_llama, pages=8).generate([prompt], greedy)
    assert answer.token_ids == expected.token_ids


@needs_native
def test_a_named_path_that_fails_is_an_error(random_llama: Path, broken_native: None) -> None:
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, attention_backend="cpu_native")
    with pytest.raises(EngineError, match="differs from a plain forward"):
        Engine.build(config)


def test_when_the_plain_path_fails_the_worker_does_not_start(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "BOUNDS", {"float32": -1.0})
    config = EngineConfig(model=str(random_llama), kv_bytes=4 << 20, **YARDSTICK)
    with pytest.raises(EngineError, match="no other path is left on this node"):
        startup.start(config)
