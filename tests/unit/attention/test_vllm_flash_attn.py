"""The adapter of FlashAttention over its packages in torch (tests/fake_flash_attn.py): which one is
taken, and the tokens of the yardstick through a tiny engine, eager and on the GPU's graph runners.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.attention import flash_packages
from polypath.runtime.attention.flash_packages import (
    ExtensionPackage,
    FlashPackage,
    UpstreamFa3Package,
    VarlenPackage,
    VllmPackage,
    Wanted,
    find_package,
)
from polypath.runtime.attention.vllm_flash_attn import (
    VllmFlashAttnBackend,
    VllmFlashAttnCaptured,
)
from polypath.runtime.build_context import BuildContext
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.graphs.recording import Recording
from polypath.runtime.runners.static_batch import StaticBatch
from polypath.tests import fake_flash_attn
from polypath.tests.driving import build_yardstick
from polypath.tests.fake_cuda import FakeCuda
from polypath.tests.graph_engine import FakedCudaGraph, MakeBackend, MakeMechanism, parts_of
from polypath.tests.graph_parity import assert_parity

HOPPER, AMPERE = (9, 0), (8, 0)


def packages() -> dict[str, FlashPackage]:
    return {
        "fa2": VllmPackage(fake_flash_attn.Vllm(2), 2),
        "fa3": VllmPackage(fake_flash_attn.Vllm(2, 3), 3),
        "extension": ExtensionPackage(fake_flash_attn.extension()),
        "upstream": UpstreamFa3Package(fake_flash_attn.upstream_fa3),
    }


def made_of(package: FlashPackage) -> MakeBackend:
    return lambda context: VllmFlashAttnBackend(
        context.model, context.dtype, context.device, package, cuda=FakeCuda()
    )


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("fa3", FakedCudaGraph),
        ("extension", Recording),
        pytest.param("fa2", None, marks=pytest.mark.slow),
        pytest.param("fa2", FakedCudaGraph, marks=pytest.mark.slow),
        pytest.param("fa3", Recording, marks=pytest.mark.slow),
        pytest.param("upstream", Recording, marks=pytest.mark.slow),
    ],
)
def test_gives_the_tokens_of_the_yardstick(
    random_llama: Path, name: str, mechanism: MakeMechanism | None
) -> None:
    backend = made_of(packages()[name])
    assert_parity(random_llama, backend, has_window=name == "extension", mechanism=mechanism)


@pytest.mark.slow
def test_flash_attn_takes_pages_of_256_tokens(random_llama: Path) -> None:
    backend = made_of(VarlenPackage("flash_attn", fake_flash_attn.flash_attn))
    assert_parity(random_llama, backend, mechanism=Recording, page_size=256)


@pytest.mark.parametrize("fault", ["schedule", pytest.param("lengths", marks=pytest.mark.slow)])
def test_a_stale_step_shows(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    name = {"lengths": "refresh", "schedule": "_schedule"}[fault]
    refresh = getattr(VllmFlashAttnCaptured, name)
    done: list[object] = []

    def only_once(self: VllmFlashAttnCaptured, *args: Any) -> None:
        if fault == "schedule" and self not in done:
            done.append(self)
            refresh(self, *args)

    monkeypatch.setattr(VllmFlashAttnCaptured, name, only_once)
    with pytest.raises(AssertionError):
        assert_parity(random_llama, made_of(packages()["fa3"]), mechanism=Recording)


@pytest.fixture
def context(random_llama: Path) -> BuildContext:
    return parts_of(build_yardstick(random_llama, pages=20), made_of(packages()["fa2"])).context


def test_a_schedule_keeps_its_address_and_ends_in_zeros(context: BuildContext) -> None:
    static = StaticBatch(
        tokens=3, rows=3, max_pages=8, page_size=16, device=torch.device("cpu")
    ).batch(ForwardMode.DECODE)
    backend = VllmFlashAttnBackend(
        context.model, context.dtype, context.device, packages()["fa3"], cuda=FakeCuda()
    )
    captured = backend.prepare_capture(static)
    (schedule,) = captured._metadata.values()
    assert schedule is not None and schedule.numel() == 1 + 4 * 4
    before = [t.data_ptr() for t in captured.inputs()]
    schedule.fill_(7)
    captured.refresh(replace(static, query_starts=(0, 1, 2), kv_lens=(33, 5)))
    assert schedule.tolist() == [32, 33, 5, 1, *[0] * 13], "padding sees one token"
    assert [t.data_ptr() for t in captured.inputs()] == before


# Which package.


def wanted(modules: dict[str, Any], capability: tuple[int, int] = HOPPER, **more: Any) -> Wanted:
    def load(name: str) -> Any:
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return modules[name]

    values: dict[str, Any] = {"page_size": 16} | more
    return Wanted(compute_capability=capability, load=load, **values)


ALL = {
    "vllm.vllm_flash_attn": fake_flash_attn.Vllm(2, 3),
    "flash_attn_interface": fake_flash_attn.upstream_fa3,
    "flash_attn": fake_flash_attn.flash_attn,
}


def test_vllm_comes_first_and_gives_fa3_on_hopper_and_fa2_elsewhere() -> None:
    for capability, version in ((HOPPER, 3), (AMPERE, 2), ((12, 0), 2)):
        package, refused = find_package(wanted(ALL, capability))
        assert package is not None and refused == []
        assert (package.name, package.version) == ("vllm.vllm_flash_attn", version)


def test_each_package_passed_over_says_why() -> None:
    package, refused = find_package(wanted({"flash_attn": ALL["flash_attn"]}, page_size=256))
    assert package is not None and package.name == "flash_attn"
    assert [text.partition(":")[0] for text in refused] == [
        "vllm.vllm_flash_attn",
        "_vllm_fa3_C",
        "flash_attn_interface",
    ]
    assert "No module named" in refused[0] and "no file was named" in refused[1]


@pytest.mark.parametrize(
    ("modules", "capability", "more", "text"),
    [
        ({"vllm.vllm_flash_attn": fake_flash_attn.Vllm()}, AMPERE, {}, "FA2 is not in this build"),
        ({"flash_attn_interface": fake_flash_attn.upstream_fa3}, AMPERE, {}, "this card has 8.0"),
        ({"flash_attn": fake_flash_attn.flash_attn}, AMPERE, {}, "a multiple of 256 tokens"),
        ({"vllm_flash_attn": object()}, AMPERE, {}, "built for torch 2.4.0 alone"),
        ({}, HOPPER, {"extension": "/nowhere/_vllm_fa3_C.abi3.so"}, "/nowhere/_vllm_fa3_C"),
    ],
)
def test_a_package_that_cannot_run_here_is_refused(
    modules: dict[str, Any], capability: tuple[int, int], more: dict[str, Any], text: str
) -> None:
    package, refused = find_package(wanted(modules, capability, **more))
    assert package is None and len(refused) == len(flash_packages.OPENERS)
    assert text in "; ".join(refused)


def test_an_old_flash_attn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_flash_attn.flash_attn, "__version__", "2.7.4.post1")
    _, refused = find_package(
        wanted(ALL | {"vllm.vllm_flash_attn": fake_flash_attn.Vllm()}, AMPERE)
    )
    assert "flash_attn: version 2.7.4.post1 is older than 2.8" in refused


def test_a_keyword_that_the_package_does_not_know_fails() -> None:
    with pytest.raises(TypeError, match="seqlen"):
        fake_flash_attn.Vllm(2).flash_attn_varlen_func(seqlens_k=None)  # type: ignore[call-arg]
