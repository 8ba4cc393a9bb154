"""Two paths compared operation by operation: a planted fault is named exactly, equal ones agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from polypath.deployments.cli import app
from polypath.kernels.cpu import ops as native
from polypath.runtime.attention.cpu_native import CpuNativeBackend
from polypath.runtime.config import EngineConfig
from polypath.runtime.diff import Gap, PathDiff, Row, diff
from polypath.runtime.errors import ConfigurationError
from polypath.runtime.ops.cpu_native import CpuNativeOps
from polypath.runtime.ops.torch import TorchOps
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.tapped_path import named_path
from polypath.tests import tiny_models

HARDWARE = load_hardware("this")
needs_native = pytest.mark.skipif(
    native_variant(HARDWARE) is None, reason="no build of the kernels fits this CPU"
)
LAYERS = 4
NATIVE = "cpu_native+cpu_native"
PLAIN = "eager+torch_sdpa+torch"
RUNNERS = ("eager", "cpu_graph", "piecewise_cpu_graph")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    tiny_models.random(folder, layers=LAYERS)
    return folder


def compare(model: Path, a: str, b: str) -> PathDiff:
    config = EngineConfig(model=str(model), num_threads=1)
    return diff(config, a, b, prompt_tokens=6, decodes=2)


@pytest.fixture(autouse=True)
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is looked at once."""
    one_core = replace(HARDWARE.cpu, cores_usable=1)
    hardware = replace(HARDWARE, cpu=one_core)
    monkeypatch.setattr("polypath.runtime.diff.probe", lambda: hardware)


Method = Callable[..., torch.Tensor]


def in_layer(wrong: int, plain: Method, faulty: Method) -> Method:
    """A method that is faulty in every LAYERS-th call, so in one layer of every pass."""
    calls = iter(range(1 << 30))

    def method(*args: Any) -> torch.Tensor:
        return (faulty if next(calls) % LAYERS == wrong else plain)(*args)

    return method


@needs_native
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_wrong_silu_in_layer_2_is_named(
    model: Path, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silu_mul = CpuNativeOps.silu_mul

    ones = torch.ones(tiny_models.INNER)

    def faulty(ops: CpuNativeOps, gate_up: torch.Tensor) -> torch.Tensor:
        return native.rms_norm(ops._library, silu_mul(ops, gate_up), ones, 1e-6)

    monkeypatch.setattr(CpuNativeOps, "silu_mul", in_layer(2, silu_mul, faulty))
    found = compare(model, PLAIN, f"{runner}+{NATIVE}")
    assert found.parted is not None
    assert (found.parted.layer, found.parted.operation) == (2, "silu_mul")
    assert not found.parted.is_faultless
    at_fault = [row for row in found.rows if not row.is_faultless]
    assert at_fault == [found.parted], "from the same values nothing else differs"
    following = found.rows[found.rows.index(found.parted) + 1 :]
    assert any(row.parts for row in following), "from its own values the fault spreads"
    assert "layer 2 silu_mul" in found.verdict()


@needs_native
@pytest.mark.parametrize("runner", RUNNERS)
def test_graphs_give_what_eager_gives(model: Path, runner: str) -> None:
    found = compare(model, f"eager+{NATIVE}", f"{runner}+{NATIVE}")
    assert found.parted is None
    assert found.verdict() == "the paths agree bit for bit in every operation"
    assert found.same_choices == found.choices == 16


@needs_native
def test_native_and_plain_agree_within_the_bound_and_every_operation_has_a_row(model: Path) -> None:
    found = compare(model, f"cpu_graph+{NATIVE}", PLAIN)
    assert found.parted is None, found.verdict()
    assert found.verdict().startswith("the paths agree within the bound")
    assert found.a["decode"] == f"cpu_graph+{NATIVE}" and found.b["decode"] == PLAIN
    assert {row.own.mode for row in found.rows} <= {"prefill", "mixed", "decode"}
    names = {row.operation for row in found.rows if row.layer == 1}
    assert names == {
        *("input_add_norm", "input_add_norm sum", "qkv", "qkv_norm_rope_store", "stored keys"),
        *("stored values", "attention", "o", "post_add_norm", "post_add_norm sum", "gate_up"),
        *("silu_mul", "down"),
    }
    ends = [row.operation for row in found.rows if row.layer is None]
    assert ends == ["rope cos", "rope sin", "embedding", *ends[3:]]
    assert ends[3:] == ["final_add_norm sum", "final_add_norm", "lm_head"]


def row(place: str, own: float, same: float) -> Row:
    def gap(relative: float) -> Gap:
        return Gap(largest=1.0, relative=relative, mode="decode", step=3)

    return Row(layer=1, operation=place, own=gap(own), bound=0.06, same=gap(same), same_bound=1e-4)


@pytest.mark.parametrize(
    ("rows", "parted"),
    [
        ([("o", 0.09, 0.0), ("lm_head", 0.05, 0.0)], None),  # rounding that comes to nothing
        ([("o", 0.09, 0.0), ("lm_head", 0.07, 0.0)], "o"),
        ([("o", 0.09, 0.0), ("silu_mul", 0.02, 1e-3), ("lm_head", 0.07, 0.0)], "silu_mul"),
        ([("silu_mul", 1e-3, 1e-3), ("lm_head", 1e-3, 0.0)], "silu_mul"),
    ],
)
def test_what_piles_up_counts_once_the_logits_are_beyond_their_bound(
    rows: list[tuple[str, float, float]], parted: str | None
) -> None:
    found = PathDiff(
        a={},
        b={},
        linear_methods=("dense", "dense"),
        dtypes=("float32", "float32"),
        tokens=1,
        steps=1,
        same_choices=1,
        choices=1,
        rows=tuple(row(*each) for each in rows),
    )
    assert (None if found.parted is None else found.parted.operation) == parted
    assert ("agree" in found.verdict()) == (parted is None)


@needs_native
def test_a_wrong_attention_is_named_in_a_graph_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = CpuNativeBackend.attend

    def faulty(
        backend: CpuNativeBackend, q: torch.Tensor, kv: torch.Tensor, layer: int
    ) -> torch.Tensor:
        return attend(backend, attend(backend, q, kv, layer), kv, layer)

    monkeypatch.setattr(CpuNativeBackend, "attend", in_layer(1, attend, faulty))
    found = compare(model, PLAIN, f"cpu_graph+{NATIVE}")
    assert found.parted is not None
    assert found.parted.place == "layer 1 attention"


@needs_native
def test_wrong_stored_keys_are_told_from_a_wrong_query(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TorchOps.qkv_norm_rope_store

    def faulty(ops: TorchOps, *args: Any) -> torch.Tensor:
        q = store(ops, *args)
        kv_layer, slots = args[3], args[4]
        kv_layer[slots // 16, 0, slots % 16] *= 1.01
        return q

    monkeypatch.setattr(TorchOps, "qkv_norm_rope_store", in_layer(3, store, faulty))
    found = compare(model, f"cpu_graph+{NATIVE}", PLAIN)
    assert found.parted is not None
    assert found.parted.place == "layer 3 stored keys"


@needs_native
def test_paths_over_other_weights_have_a_wider_bound(model: Path) -> None:
    found = compare(model, f"eager+{NATIVE}+int8", f"{PLAIN}+dense")
    assert found.linear_methods == ("int8", "dense")
    rows = {row.place: row for row in found.rows}
    assert rows["layer 0 qkv"].same_bound > rows["layer 0 silu_mul"].same_bound
    assert all(row.is_faultless for row in found.rows), found.verdict()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eager", "is no path"),
        ("eager+torch_sdpa", "is no path"),
        ("eager++torch", "is no path"),
        (f"{PLAIN}+float32+bfloat16", "two of dtype"),
    ],
)
def test_what_is_no_path_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        named_path(text, EngineConfig(model=""))


def test_a_path_names_method_dtype_and_device_in_any_order() -> None:
    named = named_path(f"{PLAIN}+cpu+float32+dense", EngineConfig(model=""))
    assert (named.runner, named.attention_backend, named.ops) == ("eager", "torch_sdpa", "torch")
    assert (named.linear_method, named.dtype, named.device) == ("dense", "float32", "cpu")


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["diff", *args])
    return done.exit_code, done.output


def test_the_command_says_equal_and_exits_0(model: Path) -> None:
    code, text = run(str(model), "--a", PLAIN, "--b", PLAIN, "--max-rows", "3")
    assert code == 0, text
    assert "agree bit for bit" in text
    assert sum("within" in line for line in text.splitlines()) == 3


def test_the_command_exits_1_and_its_json_names_the_place(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1 << 30))
    silu_mul = TorchOps.silu_mul

    def drifts(ops: TorchOps, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(ops, gate_up) * (1 + 0.01 * next(calls))

    monkeypatch.setattr(TorchOps, "silu_mul", drifts)
    paths = ("--a", PLAIN, "--b", PLAIN, "--decodes", "1", "--prompt-tokens", "2")
    code, text = run(str(model), *paths, "--json")
    found = json.loads(text)
    assert code == 1
    assert found["parted"] == {"layer": 0, "operation": "silu_mul"}
    assert len(found["rows"]) > 3 * LAYERS and not found["rows"][-1]["within"]
    code, text = run(str(model), *paths)
    assert code == 1 and "AT FAULT" in text


def test_the_command_exits_2_for_what_cannot_be(model: Path) -> None:
    assert run(str(model), "--a", "eager", "--b", PLAIN)[0] == 2
    code, text = run(str(model), "--a", "eager+flash+torch", "--b", PLAIN)
    assert code == 2 and "flash" in text
    assert run(str(model), "--a", PLAIN)[0] == 2


def test_a_prompt_of_text_is_run(model: Path) -> None:
    paths = ("--a", PLAIN, "--b", PLAIN, "--decodes", "0")
    code, text = run(str(model), *paths, "--prompt", "abc")
    assert code == 0 and "tokens in" in text
    code, text = run(str(model), *paths, "--prompt", "")
    assert code == 2 and "no token" in text
