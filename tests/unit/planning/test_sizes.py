"""Context, batch and KV pool within the memory that is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polypath.runtime.config import EngineConfig, ModelConfig, RopeConfig
from polypath.runtime.errors import PlanError
from polypath.runtime.planning.hardware import Hardware, load_hardware
from polypath.runtime.planning.memory import gigabytes
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.planner import plan
from polypath.tests.unit.planning.public_models import public_model

GB = 10**9


def wishes(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def with_memory(hardware: Hardware, num_bytes: int | None) -> Hardware:
    origin = "cgroup v2 memory.max of /pod" if num_bytes is not None else "unknown"
    memory = replace(hardware.memory, total_bytes=num_bytes, free_bytes=num_bytes, origin=origin)
    return replace(hardware, memory=memory)


def check_sums(found: ExecutionPlan, model: ModelConfig) -> None:
    """What must hold of every plan's numbers."""
    memory, itemsize = found.memory, 4 if found.kv_dtype == "float32" else 2
    parts = memory.weights_bytes + memory.kv_bytes + memory.activation_bytes + memory.graph_bytes
    assert parts + memory.reserve_bytes == memory.total_bytes
    assert memory.limit_bytes is None or memory.total_bytes <= memory.limit_bytes
    page_bytes = found.page_size * model.kv_bytes_per_token(itemsize)
    assert found.kv_bytes == memory.kv_bytes == found.num_pages * page_bytes
    assert found.max_model_len <= (found.num_pages - 1) * found.page_size
    assert 1 <= found.max_model_len <= model.max_position
    assert found.max_num_seqs <= found.max_num_batched_tokens


@pytest.mark.parametrize("profile", ["avx2", "h100", "t4"])
def test_numbers_add_up(model, profile) -> None:
    found = plan(load_hardware(profile), model, wishes())
    check_sums(found, model)
    assert found.memory.weights_bytes == model.num_parameters * 2


def test_the_default_pool_of_a_cpu_is_modest(avx2, model) -> None:
    found = plan(avx2, model, wishes())
    assert found.num_pages == 32 * 1024 // 16 + 1
    assert found.kv_bytes < 2 * GB and found.origins["kv_bytes"] == "default"


def test_a_card_gives_the_pool_its_share(model) -> None:
    found = plan(load_hardware("h100"), model, wishes())
    assert found.kv_bytes > 60 * GB and found.origins["kv_bytes"] == "hardware"


def test_a_container_of_one_gigabyte_refuses_with_the_numbers(avx2, model) -> None:
    small = with_memory(avx2, GB)
    with pytest.raises(PlanError) as caught:
        plan(small, model, wishes(linear_method="dense"))
    text = str(caught.value)
    for part in (
        "weights 513 MiB",
        "graphs 0 MiB",
        "KV pool",
        "reserve 384 MiB",
        "954 MiB",
        "memory.max of /pod",
    ):
        assert part in text
    assert "--dtype bfloat16 (weights 257 MiB, " in text
    assert [refusal.rule for refusal in caught.value.refusals] == ["memory"]


def test_weights_kept_as_stored_fit_where_dequantized_ones_do_not(avx2, model) -> None:
    found = plan(with_memory(avx2, GB), model, wishes())
    check_sums(found, model)
    assert found.linear_method == "dense_native"


def test_planning_before_or_after_importing_torch_agrees(avx2, model) -> None:
    early = with_memory(avx2, 4 * GB)
    held = replace(early.memory, free_bytes=4 * GB - 200_000_000, process_bytes=200_000_000)
    late = replace(early, memory=held)
    assert plan(early, model, wishes()).num_pages == plan(late, model, wishes()).num_pages


def test_what_the_refusal_proposes_fits(avx2, model) -> None:
    found = plan(with_memory(avx2, GB), model, wishes(dtype="bfloat16"))
    check_sums(found, model)


def test_a_long_context_is_cut_to_what_the_pool_holds_and_says_so(avx2, model) -> None:
    long = replace(model, max_position=131_072)
    found = plan(with_memory(avx2, 4 * GB), long, wishes())
    check_sums(found, long)
    assert 512 <= found.max_model_len < 131_072
    assert found.origins["max_model_len"] == "hardware"
    assert any("cut from the model's 131072" in note for note in found.notes)


def test_a_named_context_that_does_not_fit_is_refused_with_one_that_does(avx2, model) -> None:
    long, node = replace(model, max_position=131_072), with_memory(avx2, 4 * GB)
    with pytest.raises(PlanError) as caught:
        plan(node, long, wishes(max_model_len=131_072))
    proposal = str(caught.value.nearest).split(",")[0]
    assert proposal.startswith("--max-model-len ")
    fitting = int(proposal.split()[1])
    assert plan(node, long, wishes(max_model_len=fitting)).max_model_len == fitting


def test_more_context_than_the_model_has_is_refused(avx2, model) -> None:
    with pytest.raises(PlanError, match="9000 is more than the 8192 tokens"):
        plan(avx2, model, wishes(max_model_len=9000))


def test_a_pool_of_named_size_is_obeyed(avx2, model) -> None:
    page = 16 * model.kv_bytes_per_token(4)
    found = plan(avx2, model, wishes(kv_bytes=9 * page + 5))
    check_sums(found, model)
    assert found.num_pages == 9 and found.origins["num_pages"] == "user"
    assert found.max_model_len == 8 * 16 and found.origins["max_model_len"] == "user"


@pytest.mark.parametrize("pages", [0.5, 1, 1.9])
def test_a_pool_without_a_usable_page_is_refused(avx2, model, pages) -> None:
    page = 16 * model.kv_bytes_per_token(4)
    with pytest.raises(PlanError, match=f"--kv-bytes {2 * page} or more"):
        plan(avx2, model, wishes(kv_bytes=int(pages * page)))


def test_a_named_pool_too_small_for_the_named_context_is_refused(avx2, model) -> None:
    page = 16 * model.kv_bytes_per_token(4)
    with pytest.raises(PlanError, match="1024 tokens need 65 with the scratch page"):
        plan(avx2, model, wishes(kv_bytes=10 * page, max_model_len=1024))
    found = plan(avx2, model, wishes(kv_bytes=65 * page, max_model_len=1024))
    assert found.max_model_len == 1024


def test_a_named_pool_beyond_the_memory_is_refused(avx2, model) -> None:
    with pytest.raises(PlanError, match="a smaller --kv-bytes"):
        plan(avx2, model, wishes(kv_bytes=100 * GB))


def test_a_named_share_is_a_limit(avx2, model) -> None:
    node = with_memory(avx2, 4 * GB)
    small = plan(node, model, wishes(memory_share=0.1))
    large = plan(node, model, wishes(memory_share=0.3))
    assert small.kv_bytes < large.kv_bytes and small.origins["kv_bytes"] == "user"


def test_batch_sizes_follow_each_other(avx2, model) -> None:
    few = plan(avx2, model, wishes(max_num_batched_tokens=8))
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (8, 8)
    many = plan(avx2, model, wishes(max_num_seqs=600))
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (600, 600)
    assert many.notes and few.notes
    with pytest.raises(PlanError, match="--max-num-seqs 8 or fewer"):
        plan(avx2, model, wishes(max_num_batched_tokens=8, max_num_seqs=9))


def test_unknown_memory_is_said(avx2, model) -> None:
    found = plan(with_memory(avx2, None), model, wishes())
    check_sums(found, model)
    assert found.memory.limit_bytes is None
    assert any("unknown" in note for note in found.notes)


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(1, 40),
    hidden=st.sampled_from([64, 576, 2048]),
    kv_heads=st.sampled_from([1, 2, 4]),
    max_position=st.sampled_from([64, 512, 8192, 131_072]),
    free=st.integers(10**8, 10**11),
    options=st.fixed_dictionaries(
        {},
        optional={
            "max_num_seqs": st.integers(1, 300),
            "page_size": st.sampled_from([8, 16, 64]),
            "memory_share": st.floats(0.05, 1.0),
            "kv_bytes": st.integers(1, 10**10),
            "max_model_len": st.integers(1, 10**4),
            "dtype": st.sampled_from(["float32", "bfloat16"]),
        },
    ),
)
def test_every_plan_adds_up_or_is_refused_with_reasons(
    layers: int, hidden: int, kv_heads: int, max_position: int, free: int, options: dict[str, Any]
) -> None:
    model = ModelConfig(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=64,
        max_position=max_position,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
    )
    try:
        found = plan(with_memory(load_hardware("avx2"), free), model, wishes(**options))
    except PlanError as error:
        assert error.refusals and error.nearest
        return
    check_sums(found, model)
    for name in ("max_model_len", "max_num_seqs", "page_size", "dtype"):
        if name in options:
            assert getattr(found, name) == options[name] and found.origins[name] == "user"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(None, "unknown"), (5 << 20, "5 MiB"), (3 << 29, "1.50 GiB")]
)
def test_sizes_read_well(num_bytes, text) -> None:
    assert gigabytes(num_bytes) == text


def test_on_a_card_only_attention_that_gathers_pages_pays_for_copies_and_masks(model) -> None:
    node = load_hardware("h100")
    plain = plan(node, model, wishes(attention_backend="torch_sdpa", runner="eager"))
    found = plan(node, model, wishes(runner="eager"))
    gathers = {path.attention_backend for path in found.paths.values()} == {"torch_sdpa"}
    assert (found.memory.activation_bytes < plain.memory.activation_bytes) != gathers
    assert (found.num_pages > plain.num_pages) != gathers


@pytest.mark.parametrize("length", [8192, 131072])
def test_what_attention_keeps_for_itself_is_counted(length: int) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux on x86_64")
    from polypath.kernels.triton.decode_attention import MOST_SPLITS, SPLIT

    def planned(backend: str) -> ExecutionPlan:
        options = {"attention_backend": backend, "max_model_len": length, "max_num_seqs": 64}
        return plan(load_hardware("h200"), public_model("Llama-3.1-8B"), wishes(**options))

    triton, flashinfer = planned("triton"), planned("flashinfer")
    parts = min(MOST_SPLITS, length // SPLIT)
    both = 2 * 64 * 32 * parts * (128 + 2) * 4  # of an eager step, and of graphs
    wrappers = 2 + len(flashinfer.capture_sizes)
    assert wrappers > 2
    kept = (128 << 20) + wrappers * (8 << 20)
    difference = triton.memory.activation_bytes - flashinfer.memory.activation_bytes
    assert difference == both - kept


def test_each_window_has_plans_of_its_own() -> None:
    def activations(windows: tuple[int | None, ...]) -> int:
        model = replace(public_model("Llama-3.1-8B"), layer_windows=windows)
        options = {"attention_backend": "flashinfer", "runner": "eager", "max_model_len": 8192}
        return plan(load_hardware("h200"), model, wishes(**options)).memory.activation_bytes

    assert activations((None, 512) * 16) - activations((None,) * 32) == 2 * (8 << 20)
