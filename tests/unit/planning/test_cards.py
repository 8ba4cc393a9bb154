"""The planner as a table: profile, model and options, and what comes of them.

Cases name what is expected of records that are not built yet as well: `attention` lists whom this
node may take, best first, and the first that this version has an adapter for must be chosen. Where
a case retells a report about another engine, its id says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from polypath.runtime.errors import ModelError, PlanError
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.hardware import Driver, Hardware, Package, Torch, load_hardware
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.planner import plan
from polypath.runtime.planning.rules import Situation, why_not
from polypath.runtime.planning.selection import REGISTRIES
from polypath.tests.unit.planning.asking import first_built, refused, runners_of, wishes
from polypath.tests.unit.planning.public_models import CONFIGS, FOREIGN, public_model, read

Change = Callable[[Hardware], Hardware]
FA, FI, TR, SDPA, CPU = "vllm_flash_attn", "flashinfer", "triton", "torch_sdpa", "cpu_native"


def having(**versions: str | None) -> Change:
    """The node with other packages; None takes one away."""
    packages = {name: Package(version=version) for name, version in versions.items()}
    return lambda node: replace(node, packages={**node.packages, **packages})


def card(**values: Any) -> Change:
    return lambda node: replace(node, gpus=(replace(node.gpus[0], **values),))


def facts(**values: Any) -> Change:
    return lambda node: replace(node, **values)


VLLM = having(vllm="0.25.1", vllm_flash_attn="0.25.1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. `refused`: candidate -> rules that must be among its refusals."""

    id: str
    node: str
    model: str = "Qwen3-0.6B"
    stored: tuple[str, float] = ("bfloat16", 16.0)
    options: dict[str, Any] = field(default_factory=dict)
    change: Change = lambda node: node
    attention: tuple[str, ...] | None = None
    device: str | None = None
    dtype: str | None = None
    linear: str | None = None
    page_size: int = 16
    refused: dict[str, set[str]] = field(default_factory=dict)
    note: str = ""
    error: set[str] = field(default_factory=set)  # rules of the PlanError
    says: str = ""  # in the error, what would lift it included

    def plan(self) -> ExecutionPlan:
        node = self.change(load_hardware(self.node))
        return plan(node, public_model(self.model, *self.stored), wishes(**self.options))


CARDS = (
    Case(id="t4", node="t4", attention=(TR, SDPA), dtype="float16"),
    Case(id="l4", node="l4", attention=(FI, TR, SDPA), dtype="bfloat16"),
    Case(id="a10g", node="a10g", attention=(FI, TR, SDPA), dtype="bfloat16"),
    Case(id="a100-40", node="a100-40", model="Llama-3.1-8B", attention=(FI, TR, SDPA)),
    Case(id="a100-80", node="a100-80", model="Llama-3.1-8B", attention=(FI, TR, SDPA)),
    Case(id="h100", node="h100", model="Llama-3.1-8B", attention=(FI, TR, SDPA)),
    Case(id="h200", node="h200", model="Llama-3.1-8B", attention=(FI, TR, SDPA)),
    Case(id="b200", node="b200", model="Llama-3.1-8B", attention=(FI, TR, SDPA)),
    Case(id="b200-70B", node="b200", model="Llama-3.3-70B", attention=(FI, TR, SDPA)),
    Case(id="rtx4090", node="rtx4090", attention=(FI, TR, SDPA), dtype="bfloat16"),
    Case(id="rtx5090", node="rtx5090", attention=(TR, FI, SDPA), dtype="bfloat16"),
    Case(id="a100-with-vllm", node="a100-80", change=VLLM, attention=(FA, FI, TR, SDPA)),
    Case(id="h200-with-vllm", node="h200", change=VLLM, attention=(FA, FI, TR, SDPA)),
    Case(id="b200-with-vllm", node="b200", change=VLLM, attention=(FI, FA, TR, SDPA)),
    Case(
        id="h100-with-nothing-installed",
        node="h100",
        change=having(flashinfer=None, triton=None),
        attention=(SDPA,),
        refused={"attention/flashinfer": {"package"}, "attention/triton": {"package"}},
    ),
    Case(id="biases-of-qwen2", node="h100", model="Qwen2.5-7B", attention=(FI, TR, SDPA)),
    Case(id="window-of-mistral", node="l4", model="Mistral-7B-v0.1", attention=(FI, TR, SDPA)),
    Case(id="no-groups", node="h100", model="Llama-2-7B", attention=(FI, TR, SDPA)),
    Case(
        id="heads-of-80",
        node="h100",
        model="phi-2-sized Llama",
        attention=None,
        refused={"attention/flashinfer": {"head_dim"}},
    ),
    Case(
        id="heads-of-80-with-vllm",
        node="h100",
        model="phi-2-sized Llama",
        change=VLLM,
        attention=None,
        refused={"attention/flashinfer": {"head_dim"}},
    ),
    Case(
        id="float32-leaves-the-16-bit-backends",
        node="h100",
        change=VLLM,
        options={"dtype": "float32"},
        attention=(TR, SDPA),
        refused={"attention/flashinfer": {"dtype"}, "attention/vllm_flash_attn": {"dtype"}},
    ),
)

WRONG_DEFAULTS = (
    Case(
        id="sglang-14842-sm_120-takes-what-is-compiled-for-it",
        node="rtx5090",
        change=VLLM,
        attention=(TR, FI, FA, SDPA),
    ),
    Case(
        id="sglang-12178-rtx-pro-6000-gets-no-kernels-of-hopper",
        node="rtx5090",
        change=lambda node: VLLM(card(name="NVIDIA RTX PRO 6000", total_bytes=96 << 30)(node)),
        attention=(TR, FI, FA, SDPA),
    ),
    Case(
        id="sglang-40558-a-card-newer-than-every-list",
        node="rtx5090",
        change=lambda node: VLLM(card(name="NEXT", compute_capability=(13, 0))(node)),
        attention=(TR, SDPA),
        refused={
            "attention/flashinfer": {"device_class"},
            "attention/vllm_flash_attn": {"device_class"},
        },
    ),
    Case(
        id="sglang-9140-new-card-under-an-old-build-of-torch",
        node="rtx5090",
        change=facts(torch=Torch(version="2.11.0+cu126", cuda="12.6")),
        device="cpu",
        refused={"device/cuda": {"device.card_age"}},
        note="CUDA 12.8 was the first",
    ),
    Case(
        id="sglang-rule-57-a-card-older-than-turing",
        node="t4",
        change=card(name="Tesla V100", compute_capability=(7, 0)),
        device="cpu",
        refused={"device/cuda": {"device.card_age"}},
        note="the oldest is 7.5",
    ),
    Case(
        id="vllm-29743-turing-has-a-backend-left",
        node="t4",
        change=VLLM,
        attention=(TR, SDPA),
        refused={
            "attention/flashinfer": {"device_class"},
            "attention/vllm_flash_attn": {"compute_capability", "device_class"},
        },
    ),
    Case(
        id="vllm-4246-flash-attention-named-on-turing",
        node="t4",
        change=VLLM,
        options={"attention_backend": FA},
        error={"compute_capability", "device_class"},
        says="Tesla T4 has 7.5",
    ),
    Case(
        id="flashinfer-named-on-turing",
        node="t4",
        options={"attention_backend": FI},
        error={"device_class"},
        says="on no list for sm_75",
    ),
    Case(
        id="vllm-15853-bfloat16-weights-on-turing-change-and-say-so",
        node="t4",
        dtype="float16",
        refused={"dtype/bfloat16": {"dtype.compute_capability"}},
        note="float16 instead of bfloat16: bfloat16 needs compute capability 8.0",
    ),
    Case(
        id="bfloat16-named-on-turing",
        node="t4",
        options={"dtype": "bfloat16"},
        error={"dtype.compute_capability"},
        says="--dtype float16",
    ),
    Case(
        id="sglang-27456-no-card-and-cuda-named",
        node="epyc-avx2",
        options={"device": "cuda"},
        error={"device.card"},
        says="--device cpu",
    ),
    Case(id="sglang-18507-a-cpu-is-no-special-case", node="epyc-avx2", device="cpu"),
    Case(
        id="gpustack-3326-rocm-falls-to-the-cpu-and-says-so",
        node="mi300x",
        device="cpu",
        attention=(CPU, SDPA),
        refused={"device/cuda": {"device.vendor"}},
        note="AMD Instinct MI300X is no NVIDIA card",
    ),
    Case(
        id="rocm-named",
        node="mi300x",
        options={"device": "cuda"},
        error={"device.vendor"},
        says="--device cpu",
    ),
    Case(
        id="vllm-18301-a-cpu-build-of-torch-on-a-gpu-node",
        node="h100",
        change=facts(torch=Torch(version="2.13.0+cpu")),
        device="cpu",
        refused={"device/cuda": {"device.torch_build"}},
        note="built without CUDA",
    ),
    Case(
        id="ollama-16684-a-driver-that-is-too-old",
        node="a100-40",
        change=facts(driver=Driver(version="535.1", cuda_version=(12, 2))),
        device="cpu",
        refused={"device/cuda": {"device.driver"}},
        note="runs CUDA up to 12.2",
    ),
)

ACCEPTED_THEN_CRASHED = (
    Case(
        id="sglang-38943-a-graph-named-over-attention-that-cannot-be-captured",
        node="h100",
        options={"runner": "cuda_graph", "attention_backend": SDPA},
        error={"graph_support"},
        says="which torch_sdpa does not allow",
    ),
    Case(
        id="dynamo-14800-a-page-size-no-backend-of-that-name-takes",
        node="a100-80",
        change=VLLM,
        options={"page_size": 8, "attention_backend": FA},
        error={"page_size"},
        says="takes pages of 16, 32, 64, 128, 256 tokens; this plan has 8",
    ),
    Case(
        id="sglang-28825-a-page-size-excludes-a-better-backend-by-name",
        node="a100-80",
        change=VLLM,
        options={"page_size": 8},
        page_size=8,
        refused={"attention/vllm_flash_attn": {"page_size"}},
    ),
    Case(
        id="dynamo-8609-a-context-smaller-than-a-bucket",
        node="h100",
        options={"max_model_len": 16},
        attention=(FI, TR, SDPA),
    ),
    Case(
        id="vllm-flash-attn-named-and-not-installed",
        node="h100",
        options={"attention_backend": FA},
        error={"package"},
        says="vllm_flash_attn is not installed",
    ),
    Case(
        id="flashinfer-named-for-float32",
        node="h100",
        options={"attention_backend": FI, "dtype": "float32"},
        error={"dtype"},
        says="bfloat16, float16",
    ),
    Case(
        id="flashinfer-named-for-heads-of-80",
        node="h100",
        model="phi-2-sized Llama",
        options={"attention_backend": FI},
        error={"head_dim"},
        says="this model has 80",
    ),
    Case(
        id="a-package-that-does-not-import",
        node="h100",
        change=facts(
            packages={"triton": Package(version="3.6.0", imports=False, problem="no libcuda")}
        ),
        attention=(SDPA,),
        refused={"attention/triton": {"package"}, "ops/triton": {"package"}},
    ),
    Case(
        id="a-cpu-backend-named-on-a-card",
        node="h100",
        options={"attention_backend": CPU},
        error={"device"},
        says="this plan is for cuda",
    ),
    Case(
        id="a-gpu-runner-named-on-a-cpu",
        node="xeon-amx",
        options={"runner": "cuda_graph"},
        error={"device"},
        says="--runner cpu_graph",
    ),
    Case(
        id="a-cpu-graph-named-without-native-kernels",
        node="graviton",
        options={"runner": "cpu_graph"},
        error={"native_kernels.isa"},
        says="x86_64",
    ),
    Case(
        id="fp8-weights-named-below-8.9",
        node="a100-80",
        options={"linear_method": "fp8"},
        error={"compute_capability"},
        says="at least 8.9",
    ),
)

SILENCE = (
    Case(
        id="sglang-18550-fp8-keys-named-with-a-backend-that-has-none",
        node="h100",
        change=VLLM,
        options={"attention_backend": FA, "kv_dtype": "fp8_e5m2"},
        error={"kv_dtype"},
        says="this plan stores fp8_e5m2",
    ),
    Case(
        id="vllm-26431-fp8-keys-on-the-plain-backend",
        node="a10g",
        options={"attention_backend": SDPA, "kv_dtype": "fp8_e4m3"},
        error={"kv_dtype"},
        says="this plan stores fp8_e4m3",
    ),
    Case(
        id="sglang-7042-why-the-graph-does-not-run",
        node="h100",
        options={"attention_backend": SDPA},
        attention=(SDPA,),
        refused={"runner/cuda_graph": {"graph_support"}},
    ),
    Case(
        id="dynamo-13216-the-page-size-that-was-named-stays",
        node="b200",
        options={"page_size": 64},
        page_size=64,
        attention=(FI, TR, SDPA),
    ),
    Case(
        id="sglang-33352-eager-named-is-eager-everywhere",
        node="h100",
        options={"runner": "eager"},
    ),
    Case(
        id="sglang-31-graphs-that-need-native-kernels-say-so",
        node="epyc-avx2",
        options={"ops": "torch"},
        refused={"runner/cpu_graph": {"graph_support.native"}},
    ),
    Case(
        id="sglang-43-amx-is-no-assumption",
        node="xeon-amx",
        change=lambda node: replace(node, cpu=replace(node.cpu, isa=("avx2",)), native_kernels=()),
        device="cpu",
        attention=(SDPA,),
        refused={"attention/cpu_native": {"native_kernels.isa"}},
    ),
    Case(
        id="half-precision-on-a-cpu-is-obeyed-with-its-cost",
        node="epyc-avx2",
        options={"dtype": "bfloat16"},
        attention=(SDPA,),
        refused={"attention/cpu_native": {"dtype"}},
        note="warning: bfloat16 is slow on this processor",
    ),
)

CPUS = (
    Case(id="xeon-amx", node="xeon-amx", attention=(CPU,), linear="dense_native"),
    Case(id="epyc-avx2", node="epyc-avx2", attention=(CPU,), linear="dense_native"),
    Case(
        id="graviton-runs-torch",
        node="graviton",
        attention=(SDPA,),
        linear="dense",
        refused={
            "attention/cpu_native": {"native_kernels.isa"},
            "linear/torch_int8": {"architecture", "isa"},
        },
    ),
    Case(
        id="graviton-with-8-bits-asked",
        node="graviton",
        options={"quantization": "int8"},
        error={"architecture", "isa", "native_kernels.isa"},
        says="written for x86_64",
    ),
    Case(
        id="blocks-run-as-stored",
        node="xeon-amx",
        model="Llama-3.1-8B",
        stored=("Q4_K", 4.85),
        linear="int4_group",
        note="Q4_K weights are repacked",
    ),
    Case(
        id="no-compiler-no-kernels",
        node="epyc-avx2",
        change=facts(native_kernels=()),
        attention=(SDPA,),
        linear="dense",
        refused={"ops/cpu_native": {"native_kernels.missing"}},
    ),
)

MEMORY = (
    Case(
        id="8B-in-16-bits-is-too-much-for-a-t4",
        node="t4",
        model="Llama-3.1-8B",
        error={"memory"},
        says="weights 14.96 GiB",
    ),
    Case(
        id="70B-is-too-much-for-an-h100-and-fits-beside-it-in-8-bits",
        node="h100",
        model="Llama-3.3-70B",
        error={"memory"},
        says="--device cpu --quantization int8",
    ),
    Case(
        id="32B-is-too-much-for-a-5090-and-fits-beside-it-in-4-bits",
        node="rtx5090",
        model="Qwen3-32B",
        error={"memory"},
        says="--device cpu --quantization int4",
    ),
    Case(
        id="blocks-on-a-card-are-dequantized-with-the-bytes",
        node="l4",
        model="Llama-3.1-8B",
        stored=("Q4_K", 4.85),
        device="cuda",
        linear="dense",
        note="Q4_K weights (4.53 GiB) are dequantized to bfloat16 when they load (14.96 GiB)",
    ),
    Case(
        id="blocks-on-a-card-they-do-not-fit",
        node="t4",
        model="Llama-3.1-8B",
        stored=("Q4_K", 4.85),
        error={"memory"},
        says="weights 14.96 GiB (dequantized from 4.53 GiB of Q4_K)",
    ),
    Case(
        id="what-does-not-fit-the-card-as-floats-fits-the-host-as-stored",
        node="t4",
        model="Llama-3.1-8B",
        stored=("Q4_K", 4.85),
        error={"memory"},
        says="--device cpu (weights",
    ),
    Case(
        id="int8-asked-of-blocks-on-a-card",
        node="l4",
        stored=("Q8_0", 8.5),
        options={"quantization": "int8"},
        error={"device"},
        says="int8 needs a cpu device",
    ),
    Case(
        id="a-context-that-is-too-long-is-cut-and-said",
        node="a10g",
        model="Llama-3.1-8B",
        attention=(FI, TR, SDPA),
        note="max_model_len is cut from the model's 131072",
    ),
    Case(
        id="a-context-named-that-is-too-long",
        node="a10g",
        model="Llama-3.1-8B",
        options={"max_model_len": 131072},
        error={"memory"},
        says="--max-model-len ",
    ),
    Case(
        id="more-context-than-the-model-has",
        node="h200",
        options={"max_model_len": 100_000},
        error={"sizes.max_model_len"},
        says="40960",
    ),
)

NODES_AND_SIZES = (
    Case(
        id="keys-of-16-bits-on-a-cpu-are-for-those-that-read-them",
        node="epyc-avx2",
        options={"kv_dtype": "bfloat16"},
        attention=(CPU,),
        refused={"attention/torch_sdpa": {"kv_dtype"}},
    ),
    Case(
        id="the-first-card-is-lost-and-the-second-is-not",
        node="h100",
        change=lambda node: replace(
            node, gpus=(replace(node.gpus[0], problem="GPU is lost"), node.gpus[0])
        ),
        device="cuda",
    ),
    Case(
        id="a-card-beside-one-of-another-maker",
        node="h100",
        change=lambda node: replace(node, gpus=(replace(node.gpus[0], vendor="amd"), node.gpus[0])),
        device="cuda",
    ),
    Case(
        id="ollama-15918-every-card-is-hidden",
        node="h100",
        change=card(problem="hidden by CUDA_VISIBLE_DEVICES="),
        device="cpu",
        refused={"device/cuda": {"device.problem"}},
        note="hidden by CUDA_VISIBLE_DEVICES=",
    ),
    Case(
        id="no-torch",
        node="xeon-amx",
        change=facts(torch=Torch(version=None)),
        error={"device.torch"},
        says="install torch",
    ),
    Case(
        id="more-threads-than-cores",
        node="xeon-amx",
        options={"num_threads": 64},
        error={"num_threads"},
        says="--num-threads 16 or fewer",
    ),
    Case(
        id="more-requests-than-tokens",
        node="l4",
        options={"max_num_seqs": 64, "max_num_batched_tokens": 32},
        error={"sizes.batch"},
        says="--max-num-batched-tokens 64 or more",
    ),
    Case(
        id="a-pool-too-small-for-the-context",
        node="l4",
        options={"kv_bytes": 1 << 20, "max_model_len": 4096},
        error={"sizes.kv_bytes"},
        says="or more",
    ),
)

CASES = (
    *CARDS,
    *WRONG_DEFAULTS,
    *ACCEPTED_THEN_CRASHED,
    *SILENCE,
    *CPUS,
    *MEMORY,
    *NODES_AND_SIZES,
)


@pytest.mark.parametrize("case", [c for c in CASES if not c.error], ids=lambda case: case.id)
def test_a_case_has_the_path_the_refusals_and_the_notes_it_should(case: Case) -> None:
    found = case.plan()
    if case.attention is not None:
        attention = first_built("attention", *case.attention)
        assert {path.attention_backend for path in found.paths.values()} == {attention}
        if found.device == "cuda" and "runner" not in case.options:
            assert {m: p.runner for m, p in found.paths.items()} == runners_of(attention)
    if "runner" in case.options:
        assert {path.runner for path in found.paths.values()} == {case.options["runner"]}
    assert found.page_size == case.page_size
    for name, expected in (("device", case.device), ("dtype", case.dtype)):
        assert expected is None or getattr(found, name) == expected
    assert case.linear in (None, found.linear_method)
    for candidate, rules in case.refused.items():
        assert rules <= refused(found)[candidate], candidate
    assert any(case.note in note for note in found.notes) or not case.note, found.notes


@pytest.mark.parametrize("case", [c for c in CASES if c.error], ids=lambda case: case.id)
def test_a_case_that_cannot_be_is_refused_by_name(case: Case) -> None:
    with pytest.raises(PlanError) as caught:
        case.plan()
    rules = {refusal.rule for refusal in caught.value.refusals}
    assert case.error <= rules, rules
    lifts = " ".join(refusal.lift for refusal in caught.value.refusals)
    assert case.says in f"{caught.value} {lifts}"


def test_there_are_cases_enough_and_each_has_a_name_of_its_own() -> None:
    assert len(CASES) >= 80
    assert len({case.id for case in CASES}) == len(CASES)


def test_who_compiles_with_nvcc_is_refused_without_it() -> None:
    """SGLang #5389: compiled at the first request, where that could be known before."""
    node = replace(load_hardware("h100"), nvcc=None)
    found = refused(plan(node, public_model("Qwen3-0.6B"), wishes()))
    built_before = having(flashinfer_jit_cache="0.6.18")(node)
    after = refused(plan(built_before, public_model("Qwen3-0.6B"), wishes()))
    for candidate in REGISTRIES["attention"]:
        name = f"attention/{candidate.name}"
        needs_it = candidate.capability.needs_nvcc
        assert ("nvcc" in found.get(name, set())) == needs_it
        assert "nvcc" not in after.get(name, set())


@pytest.mark.parametrize("node", ["t4", "a100-80", "h200", "b200", "rtx5090"])
def test_a_first_start_that_compiles_for_minutes_is_said(node: str) -> None:
    found = plan(load_hardware(node), public_model("Qwen3-0.6B"), wishes())
    backends = {path.attention_backend for path in found.paths.values()}
    slow = [
        c.name for c in REGISTRIES["attention"] if c.capability.needs_nvcc and c.name in backends
    ]
    said = [note for note in found.notes if "compiles kernels" in note]
    assert [name for name in slow if any(name in note for note in said)] == slow
    assert len(said) == len(slow)
    ready = having(flashinfer_jit_cache="0.6.18")(load_hardware(node))
    notes = plan(ready, public_model("Qwen3-0.6B"), wishes()).notes
    assert not any("compiles kernels" in note for note in notes)


def test_heads_that_share_too_much_are_refused_by_whoever_has_a_limit() -> None:
    shared = replace(public_model("Llama-3.1-8B"), num_kv_heads=1)
    found = refused(plan(load_hardware("h100"), shared, wishes()))
    for candidate in REGISTRIES["attention"]:
        limit = candidate.capability.max_group_size
        is_refused = "group_size" in found.get(f"attention/{candidate.name}", set())
        assert is_refused == (limit is not None and limit < 32)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_we_do_not_compute_is_refused_before_any_plan(name: str) -> None:
    with pytest.raises(ModelError, match=r"unknown|not supported"):
        read(FOREIGN[name])


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"draft_width": 4}, "speculation.width"),
        ({"draft_width": 4, "is_draft_tree": True}, "speculation.tree"),
        ({"draft_width": 4, "page_size": 64, "is_draft_tree": True}, "speculation.tree"),
        ({}, "mode"),
    ],
    ids=["sglang-36352-ngram", "sglang-13352-top-k", "sglang-9784-pages", "plain-verify"],
)
@pytest.mark.parametrize("node", ["t4", "h200", "rtx5090", "epyc-avx2"])
def test_speculation_is_refused_by_whoever_does_not_claim_it(node, values, rule) -> None:
    hardware = load_hardware(node)
    device = "cuda" if hardware.gpus else "cpu"
    shared: dict[str, Any] = {"dtype": "float32", "kv_dtype": "float32", "page_size": 16}
    situation = Situation(
        hardware=hardware,
        model=public_model("Llama-3.2-1B"),
        device=device,
        mode=ForwardMode.VERIFY,
        **(shared | values),
    )
    for candidate in REGISTRIES["attention"]:
        record = candidate.capability
        claims = {
            "speculation.width": record.draft_width >= 4,
            "speculation.tree": record.draft_trees,
            "mode": ForwardMode.VERIFY in record.modes,
        }
        found = {refusal.rule for refusal in why_not(record, situation)}
        assert (rule in found) != claims[rule], record.name


@pytest.mark.parametrize(
    ("demand", "rule"),
    [({"attention_sinks": True}, "attention_sinks"), ({"attention_soft_cap": 50.0}, "soft_cap")],
    ids=["vllm-28589-sinks", "soft-cap"],
)
@pytest.mark.parametrize("node", ["t4", "h200", "rtx5090", "epyc-avx2"])
def test_sinks_and_caps_are_refused_by_whoever_does_not_claim_them(node, demand, rule) -> None:
    model = replace(public_model("Llama-3.2-1B"), **demand)
    field_name = {"soft_cap": "soft_cap", "attention_sinks": "attention_sinks"}[rule]
    able = {c.name for c in REGISTRIES["attention"] if getattr(c.capability, field_name)}
    try:
        found = plan(load_hardware(node), model, wishes())
    except PlanError as error:
        assert rule in {refusal.rule for refusal in error.refusals}
    else:
        assert {path.attention_backend for path in found.paths.values()} <= able


@pytest.mark.parametrize("name", CONFIGS)
def test_every_public_model_has_a_plan_on_the_largest_card(name: str) -> None:
    found = plan(load_hardware("b200"), public_model(name), wishes())
    assert found.device == "cuda" and found.memory.total_bytes <= (found.memory.limit_bytes or 0)


@pytest.mark.parametrize("node", ["t4", "l4", "h200", "rtx5090"])
def test_no_graph_is_padded_more_than_a_quarter(node: str) -> None:
    """SGLang #31487: more than twice padded goes eager. Ours have no such gap."""
    from polypath.runtime.planning.capture_sizes import padded_sizes

    most = plan(load_hardware(node), public_model("Qwen3-0.6B"), wishes()).max_num_seqs
    sizes = padded_sizes(most)
    for rows in range(5, most + 1):
        graph = min(size for size in sizes if size >= rows)
        assert graph <= max(8, rows * 1.25)


def test_what_the_planner_chose_is_never_called_the_users_word() -> None:
    """SGLang #34684: "you specified" for a value that the system chose."""
    found = plan(load_hardware("t4"), public_model("Qwen3-0.6B"), wishes())
    assert "user" not in found.origins.values()
    with pytest.raises(PlanError) as caught:
        plan(load_hardware("t4"), public_model("Llama-3.1-8B"), wishes())
    assert not str(caught.value).startswith("--")


def test_pages_of_another_size_are_a_stated_change(monkeypatch) -> None:
    """Dynamo #13216: 16 became 64 and nobody said so."""
    from polypath.runtime.planning import candidate, priorities, selection

    record = replace(
        next(c for c in REGISTRIES["attention"] if c.name == "torch_sdpa").capability,
        name="large_pages",
        page_sizes=(64, 128),
    )
    monkeypatch.setitem(priorities.ATTENTION, "sm_75", ("large_pages", "torch_sdpa"))
    candidates = (candidate.Candidate("large_pages", record=record), *REGISTRIES["attention"])
    monkeypatch.setitem(selection.REGISTRIES, "attention", candidates)
    found = plan(load_hardware("t4"), public_model("Qwen3-0.6B"), wishes())
    assert found.page_size == 64
    assert "pages of 64 tokens instead of 16, for large_pages" in found.notes
