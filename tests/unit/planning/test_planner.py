"""From hardware, model and wishes to a plan: paths, refusals and origins."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from polypath.runtime.errors import PlanError
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.capability import STEP_MODES
from polypath.runtime.planning.hardware import (
    Compiler,
    Driver,
    Gpu,
    Hardware,
    Package,
    Torch,
    load_hardware,
)
from polypath.runtime.planning.planner import plan
from polypath.runtime.planning.selection import REGISTRIES
from polypath.tests.unit.planning.asking import NATIVE, PROFILES, YARDSTICK, refused, wishes

CARD_WITHOUT_CUDA = Gpu(index=0, name="NVIDIA card (/dev/nvidia0)", problem="NVML: mismatch")


@pytest.mark.parametrize(
    ("profile", "device", "dtype", "batch"),
    [
        ("avx2", "cpu", "float32", (32, 512)),
        ("h100", "cuda", "bfloat16", (256, 8192)),
        ("t4", "cuda", "float16", (256, 8192)),
    ],
)
def test_each_profile_gets_its_path(model, profile, device, dtype, batch) -> None:
    found = plan(load_hardware(profile), model, wishes())
    if device == "cpu":
        assert {mode: found.path_name(mode) for mode in found.paths} == NATIVE
        assert found.capture_sizes == (1, 2, 4, 8, 16, 32)
    assert (found.device, found.dtype, found.kv_dtype) == (device, dtype, dtype)
    method = "dense" if device == "cuda" else "dense_native"
    assert (found.page_size, found.linear_method) == (16, method)
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.max_waiting) == (*batch, 256)
    assert found.max_model_len == 8192 and found.origins["max_model_len"] == "model"
    assert "assumes" in found.software


@pytest.mark.parametrize(
    ("profile", "candidate", "expected"),
    [
        ("avx2", "device/cuda", {"device.card"}),
        ("avx2", "attention/flashinfer", {"device", "package"}),
        ("avx2", "attention/torch_sdpa", {"rank"}),
        ("avx2", "ops/torch", {"rank"}),
        ("avx2", "linear/int8", {"rank"}),
        ("avx2", "linear/dense", {"rank"}),
        ("avx2", "runner/cuda_graph", {"device"}),
        ("avx2", "runner/eager", {"rank"}),
        ("avx2", "linear/fp8", {"device"}),
        ("h100", "attention/vllm_flash_attn", {"package"}),
        ("t4", "dtype/bfloat16", {"dtype.compute_capability"}),
        ("t4", "attention/vllm_flash_attn", {"compute_capability", "device_class", "package"}),
        ("t4", "linear/fp8", {"compute_capability"}),
        ("t4", "ops/cpu_native", {"device"}),
    ],
)
def test_each_profile_gives_these_refusals(model, profile, candidate, expected) -> None:
    found = refused(plan(load_hardware(profile), model, wishes()))[candidate]
    assert found - {"adapter"} == expected


@pytest.mark.parametrize("profile", PROFILES)
def test_every_refused_candidate_says_why_and_what_would_lift_it(model, profile) -> None:
    found = plan(load_hardware(profile), model, wishes())
    assert found.rejected
    for item in found.rejected:
        assert item.refusals
        for refusal in item.refusals:
            assert refusal.sentence and refusal.lift and refusal.rule


@pytest.mark.parametrize("profile", PROFILES)
def test_every_candidate_is_chosen_or_refused(model, profile) -> None:
    found = plan(load_hardware(profile), model, wishes())
    for mode, path in found.paths.items():
        chosen = {f"runner/{path.runner}", f"attention/{path.attention_backend}"}
        chosen |= {f"ops/{path.ops}", f"linear/{found.linear_method}"}
        said = {f"{r.kind}/{r.candidate}" for r in found.rejected if r.mode in (None, mode)}
        for kind, candidates in REGISTRIES.items():
            for candidate in candidates:
                if mode in candidate.capability.modes:
                    name = f"{kind}/{candidate.name}"
                    assert (name in chosen) != (name in said), (mode, name)


def test_this_node_gets_a_plan(model) -> None:
    found = plan(load_hardware("this"), model, wishes())
    assert set(found.paths) == set(STEP_MODES)


@pytest.mark.parametrize("profile", PROFILES)
def test_planning_twice_gives_the_same_plan_and_changes_nothing(model, profile) -> None:
    hardware, config = load_hardware(profile), wishes()
    before = json.dumps(hardware.to_json())
    assert plan(hardware, model, config) == plan(hardware, model, config)
    assert json.dumps(hardware.to_json()) == before


def test_planning_needs_neither_torch_nor_the_packages_of_serving() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'ray', 'fastapi', 'pydantic', 'gguf', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from polypath.runtime.config import EngineConfig, ModelConfig, RopeConfig\n"
        "from polypath.runtime.planning.hardware import load_hardware\n"
        "from polypath.runtime.planning.planner import plan\n"
        "model = ModelConfig(family='llama', architecture='L', vocab_size=64, hidden_size=64,\n"
        "    intermediate_size=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64,\n"
        "    max_position=64, rms_norm_eps=1e-5, rope=RopeConfig())\n"
        "print(plan(load_hardware('this'), model, EngineConfig(model='m')).device)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("cpu", "cuda")


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_record_read_from_source_is_the_module_constant(kind) -> None:
    for candidate in REGISTRIES[kind]:
        assert candidate.capability.kind == kind
        if candidate.module is not None:
            module = importlib.import_module(f"polypath.runtime.{candidate.module}")
            assert candidate.load() is module
            assert candidate.capability == module.CAPABILITY


# What the user named.


@pytest.mark.parametrize(
    ("options", "expected_rules", "nearest"),
    [
        (
            {"attention_backend": "flashinfer"},
            {"device", "package"},
            "--attention-backend cpu_native",
        ),
        ({"device": "cuda"}, {"device.card"}, "--device cpu"),
        ({"runner": "cuda_graph"}, {"device"}, "--runner cpu_graph"),
        ({"ops": "triton"}, {"device", "package"}, "--ops cpu_native"),
        ({"linear_method": "fp8"}, {"device"}, "--linear-method dense_native"),
        ({"kv_dtype": "fp8_e4m3"}, {"kv_dtype"}, "--kv-dtype float32"),
        (
            {"runner": "cpu_graph", "attention_backend": "torch_sdpa"},
            {"graph_support"},
            "--runner eager",
        ),
        (
            {"runner": "cpu_graph", "linear_method": "dense"},
            {"graph_support.native"},
            "--runner eager",
        ),
    ],
)
def test_an_impossible_wish_is_an_error(avx2, model, options, expected_rules, nearest) -> None:
    with pytest.raises(PlanError) as caught:
        plan(avx2, model, wishes(**options))
    error = caught.value
    assert {refusal.rule for refusal in error.refusals} - {"adapter"} == expected_rules
    assert error.nearest == nearest and nearest in str(error)
    for name, value in options.items():
        assert f"--{name.replace('_', '-')} {value}" in str(error)
    assert all(refusal.sentence in str(error) for refusal in error.refusals)


def test_the_nearest_choice_works(avx2, model) -> None:
    assert plan(avx2, model, wishes(attention_backend="torch_sdpa")).origins[
        "attention_backend"
    ] == ("user")


@pytest.mark.parametrize(
    "name", ["device", "dtype", "kv_dtype", "runner", "attention_backend", "ops", "linear_method"]
)
def test_an_unknown_name_lists_the_known_ones(avx2, model, name) -> None:
    with pytest.raises(PlanError, match=r"'nonsense' is unknown; it is one of auto, \w+"):
        plan(avx2, model, wishes(**{name: "nonsense"}))


def test_origins_tell_who_asked(avx2, model) -> None:
    found = plan(avx2, model, wishes(dtype="bfloat16", max_num_seqs=4, prefix_cache=False))
    assert found.origins["dtype"] == found.origins["max_num_seqs"] == "user"
    assert found.origins["prefix_cache"] == "user"
    assert found.origins["device"] == "hardware" and found.origins["page_size"] == "default"
    assert plan(load_hardware("h100"), model, wishes()).origins["dtype"] == "model"
    assert plan(load_hardware("t4"), model, wishes()).origins["dtype"] == "hardware"


# Types (case 30).


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_slow_type_is_obeyed_with_its_measured_cost(avx2, model, dtype) -> None:
    found = plan(avx2, model, wishes(dtype=dtype))
    assert found.dtype == found.kv_dtype == dtype
    assert any(n.startswith("warning") and "times slower" in n for n in found.notes)


def test_a_processor_that_has_the_type_gets_no_warning(avx2, model) -> None:
    fast = replace(avx2, cpu=replace(avx2.cpu, isa=(*avx2.cpu.isa, "amx_bf16")))
    found = plan(fast, model, wishes(dtype="bfloat16"))
    assert not any(note.startswith("warning") for note in found.notes)


def test_a_changed_type_is_said(model) -> None:
    found = plan(load_hardware("t4"), model, wishes())
    assert any(note.startswith("float16 instead of bfloat16") for note in found.notes)
    with pytest.raises(PlanError, match=r"7\.5") as caught:
        plan(load_hardware("t4"), model, wishes(dtype="bfloat16"))
    assert caught.value.nearest == "--dtype float16"


def test_quantized_weights_are_said_to_be_dequantized(avx2, model) -> None:
    quantized = replace(model, stored_dtype="Q4_1", weight_bytes=98_000_000)
    assert any(
        "Q4_1 weights (93 MiB) are dequantized to float32" in note and "513 MiB" in note
        for note in plan(avx2, quantized, wishes(linear_method="dense")).notes
    )
    native = plan(avx2, quantized, wishes())
    assert any("Q4_1 weights run as they are stored" in note for note in native.notes)
    assert native.memory.weights_bytes < 110_000_000


@pytest.mark.parametrize(
    ("isa", "missing"),
    [((), "avx2, fma, f16c"), (("avx2",), "fma, f16c"), (("avx2", "fma", "avx512f"), "f16c")],
)
def test_missing_flags_refuse_native_kernels_by_name(avx2, model, isa, missing) -> None:
    poor = replace(avx2, cpu=replace(avx2.cpu, isa=isa))
    found = plan(poor, model, wishes())
    assert refused(found)["ops/cpu_native"] == {"native_kernels.isa"}
    assert found.path_name(ForwardMode.DECODE) == YARDSTICK
    with pytest.raises(PlanError, match=f"does not show {missing}"):
        plan(poor, model, wishes(attention_backend="cpu_native"))


# A card that cannot be used (case 28), and no compiler (case 27).


def broken_nodes() -> list[tuple[str, Hardware, str]]:
    node, h100 = load_hardware("avx2"), load_hardware("h100")
    return [
        ("nvml", replace(node, gpus=(CARD_WITHOUT_CUDA,)), "device.problem"),
        ("torch build", replace(h100, torch=Torch(version="2.13.0+cpu")), "device.torch_build"),
        (
            "driver",
            replace(h100, driver=Driver(version="535.1", cuda_version=(12, 2))),
            "device.driver",
        ),
        (
            "hidden",
            replace(h100, gpus=(replace(h100.gpus[0], problem="hidden by CUDA_VISIBLE_DEVICES="),)),
            "device.problem",
        ),
    ]


@pytest.mark.parametrize(
    ("hardware", "rule"), [item[1:] for item in broken_nodes()], ids=[i[0] for i in broken_nodes()]
)
def test_a_card_that_cannot_be_used_is_said(model, hardware, rule) -> None:
    found = plan(hardware, model, wishes())
    assert found.device == "cpu" and found.dtype == "float32"
    assert any("a GPU is here but cannot be used" in note for note in found.notes)
    assert rule in refused(found)["device/cuda"]
    with pytest.raises(PlanError) as caught:
        plan(hardware, model, wishes(device="cuda"))
    assert rule in {refusal.rule for refusal in caught.value.refusals}
    assert caught.value.nearest == "--device cpu"


def test_the_first_usable_card_is_planned_for(model) -> None:
    h100 = load_hardware("h100")
    hardware = replace(h100, gpus=(replace(h100.gpus[0], problem="lost"), h100.gpus[0]))
    assert plan(hardware, model, wishes()).device == "cuda"


def test_a_wish_never_moves_a_plan_off_a_usable_card(model) -> None:
    with pytest.raises(PlanError, match="this plan is for cuda") as caught:
        plan(load_hardware("h100"), model, wishes(attention_backend="cpu_native"))
    assert "--device cpu" in {refusal.lift for refusal in caught.value.refusals}


def test_the_cpu_named_on_a_gpu_node_is_obeyed(model) -> None:
    found = plan(load_hardware("h100"), model, wishes(device="cpu"))
    assert found.device == "cpu" and found.origins["device"] == "user"
    assert not any(note.startswith("warning") for note in found.notes)


def test_without_torch_nothing_runs(avx2, model) -> None:
    with pytest.raises(PlanError, match="torch is not installed"):
        plan(replace(avx2, torch=Torch(version=None)), model, wishes())


def test_without_a_compiler_compiled_kernels_are_refused(avx2, model) -> None:
    problem = Compiler(path=None, problem="CC=/bin/false: exits with 1")
    bare = replace(avx2, compiler=problem, native_kernels=())
    found = plan(bare, model, wishes())
    assert refused(found)["attention/cpu_native"] == {"native_kernels.missing"}
    assert found.path_name(ForwardMode.DECODE) == YARDSTICK and found.native_kernels is None
    with pytest.raises(PlanError, match="CC=/bin/false") as caught:
        plan(bare, model, wishes(attention_backend="cpu_native"))
    assert any("install a C++ compiler" in refusal.lift for refusal in caught.value.refusals)


def test_kernels_that_are_built_need_no_compiler(avx2, model) -> None:
    bare = replace(avx2, compiler=Compiler(path=None, problem="no c++ in PATH"))
    assert plan(bare, model, wishes()).native_kernels == "avx2"


def test_the_widest_build_that_fits_is_planned(avx2, model) -> None:
    flags = (*avx2.cpu.isa, "avx512f", "avx512bw", "avx512vl", "avx512_vnni")
    wide = replace(avx2, cpu=replace(avx2.cpu, isa=flags))
    assert plan(wide, model, wishes()).native_kernels == "avx2"
    both = replace(wide, native_kernels=("avx512", "avx2", "portable"))
    assert plan(both, model, wishes()).native_kernels == "avx512"


@pytest.mark.parametrize(
    ("stored", "method"),
    [
        ("Q4_1", "int4_group"),
        ("Q4_0", "int4_group"),
        ("Q8_0", "int8"),
        ("bfloat16", "dense_native"),
        ("float32", "dense_native"),
    ],
)
def test_weights_run_as_the_checkpoint_stores_them(avx2, model, stored, method) -> None:
    found = plan(avx2, replace(model, stored_dtype=stored, weight_bytes=98_000_000), wishes())
    assert found.linear_method == method


def test_floats_are_rounded_only_when_asked(avx2, model) -> None:
    found = plan(avx2, model, wishes(linear_method="int4_group"))
    assert any("rounded to 4 bits" in note for note in found.notes)
    assert found.memory.weights_bytes < plan(avx2, model, wishes()).memory.weights_bytes / 2


def test_a_package_that_does_not_import_is_refused_with_its_reason(model) -> None:
    h100 = load_hardware("h100")
    broken = Package(version="3.7.0", imports=False, problem="ImportError: no ptxas")
    hardware = replace(h100, packages={**h100.packages, "triton": broken})
    with pytest.raises(PlanError, match="no ptxas"):
        plan(hardware, model, wishes(ops="triton"))
