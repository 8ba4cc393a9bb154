"""Every path that fits this node is run and compared; what differs or raises is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.attention.torch_sdpa import TorchSdpaBackend
from polypath.runtime.config import EngineConfig
from polypath.runtime.errors import ConfigurationError
from polypath.runtime.full_check import check_all
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant

needs_native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), kv_bytes=4 << 20, max_num_seqs=8, **options)


@needs_native
def test_every_path_that_fits_passes_and_what_does_not_fit_says_why(random_llama: Path) -> None:
    checks = check_all(config(random_llama))
    run = [found for found in checks if not found.is_refused]
    assert all(found.passed for found in run), [found for found in run if not found.passed]
    runners = {path.partition("+")[0] for found in run for path in found.paths.values()}
    assert runners >= {"cpu_graph", "piecewise_cpu_graph", "eager"}
    methods = {found.linear_method for found in run}
    assert methods >= {"dense_native", "int4_group", "int8", "dense"}
    assert all(len(found.results) == 4 for found in run)
    assert all(found.problem for found in checks if found.is_refused)
    assert len({(tuple(f.paths.values()), f.linear_method) for f in run}) == len(run)


def test_a_named_candidate_leaves_only_its_paths(random_llama: Path) -> None:
    named = config(random_llama, attention_backend="torch_sdpa", ops="torch", linear_method="dense")
    run = [found for found in check_all(named) if not found.is_refused]
    assert [set(found.paths.values()) for found in run] == [{"eager+torch_sdpa+torch"}]


def test_a_wrong_path_fails(random_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TorchSdpaBackend.attend

    def attend_badly(self: TorchSdpaBackend, *args: torch.Tensor) -> torch.Tensor:
        return attend(self, *args) * 1.5  # type: ignore[arg-type]

    monkeypatch.setattr(TorchSdpaBackend, "attend", attend_badly)
    for found in check_all(config(random_llama)):
        if not found.is_refused:
            assert found.passed == ("torch_sdpa" not in found.paths["decode"])


def test_a_path_that_raises_is_a_failure_with_its_reason(
    random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, batch: object) -> None:
        raise RuntimeError("planted fault\nand more")

    monkeypatch.setattr(TorchSdpaBackend, "plan", fail)
    failed = [f for f in check_all(config(random_llama)) if not f.is_refused and not f.passed]
    assert failed and all(found.problem == "planted fault" for found in failed)


def test_a_configuration_without_a_plan_is_an_error(random_llama: Path) -> None:
    with pytest.raises(ConfigurationError):
        check_all(config(random_llama, ops="triton"))
