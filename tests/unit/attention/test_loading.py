"""A planned backend that does not load is planned around, and the plan says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.runtime.attention import cpu_native
from polypath.runtime.attention.loading import BackendUnusable, load_backend
from polypath.runtime.build_context import BuildContext
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.hardware import Package, load_hardware
from polypath.tests.driving import build_engine, greedy, planned_path, run


def broken(context: BuildContext) -> None:
    raise ImportError("libcuda.so.1: cannot open shared object file")


def test_says_which_packages_it_could_have_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from polypath.runtime.attention import flashinfer, vllm_flash_attn

    for module, packages in (
        (flashinfer, ("flashinfer",)),
        (
            vllm_flash_attn,
            ("vllm", "flash_attn_library", "flash_attn_interface", "flash_attn", "vllm_flash_attn"),
        ),
    ):
        monkeypatch.setattr(module, "build", broken)
        name = module.CAPABILITY.name
        with pytest.raises(BackendUnusable, match=rf"{name} does not load: libcuda") as caught:
            load_backend(name, None)  # type: ignore[arg-type]
        assert caught.value.packages == packages


def test_the_next_plan_passes_over_a_package_that_did_not_load() -> None:
    hardware = load_hardware("h200")
    hardware = hardware.without_packages(("flashinfer",), "flashinfer does not load: no driver")
    assert hardware.packages["flashinfer"] == Package(
        version="0.6.18.post1", imports=False, problem="flashinfer does not load: no driver"
    )


def test_a_backend_that_does_not_load_leaves_a_ready_worker(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cpu_native" not in planned_path(random_llama):
        pytest.skip("no build of the kernels fits this CPU")
    monkeypatch.setattr(cpu_native, "build", broken)
    engine = build_engine(random_llama, pages=40)
    assert engine.plan.path_name(ForwardMode.DECODE) == "eager+torch_sdpa+torch"
    messages = [event.message for event in engine.plan.events]
    assert any("cpu_native does not load: libcuda" in text for text in messages)
    run(engine, greedy(2))
