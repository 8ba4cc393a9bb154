"""Bits of weights in plans: as stored, repacked, or rounded as asked, and refusals of the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polypath.runtime.config import ModelConfig
from polypath.runtime.errors import PlanError
from polypath.runtime.planning.hardware import Compiler, Hardware, load_hardware
from polypath.runtime.planning.plan import ExecutionPlan
from polypath.runtime.planning.planner import plan
from polypath.tests.unit.planning.asking import refused, wishes

MIXED = (("Q4_K", 60_000_000), ("Q6_K", 30_000_000), ("Q5_0", 5_000_000))


def stored(model: ModelConfig, kind: str, num_bytes: int = 100_000_000) -> ModelConfig:
    return replace(model, stored_dtype=kind, weight_bytes=num_bytes)


def without_kernels(hardware: Hardware) -> Hardware:
    compiler = Compiler(path=None, problem="no c++ in PATH")
    return replace(hardware, compiler=compiler, native_kernels=())


def outcome(found: ExecutionPlan) -> tuple[str, str, str]:
    return found.linear_method, found.quantization, found.origins["quantization"]


@pytest.mark.parametrize(
    ("kind", "asked", "expected"),
    [
        ("bfloat16", "auto", ("dense_native", "stored", "default")),
        ("bfloat16", "int8", ("int8", "int8", "user")),
        ("float32", "int4", ("int4_group", "int4", "user")),
        ("Q8_0", "int8", ("int8", "int8", "user")),
        ("Q8_0", "int4", ("int4_group", "int4", "user")),
        ("Q4_1", "int4", ("int4_group", "int4", "user")),
        ("Q4_1", "int8", ("int4_group", "int8", "user")),
        ("Q4_K", "auto", ("int4_group", "stored", "default")),
        ("Q5_0", "auto", ("int8", "stored", "default")),
        ("Q5_1", "auto", ("int8", "stored", "default")),
        ("Q5_K", "auto", ("int8", "stored", "default")),
        ("Q6_K", "auto", ("int8", "stored", "default")),
        ("Q6_K", "int4", ("int4_group", "int4", "user")),
    ],
)
def test_a_width_finds_its_method(avx2, model, kind, asked, expected) -> None:
    assert outcome(plan(avx2, stored(model, kind), wishes(quantization=asked))) == expected


@pytest.mark.parametrize(
    ("method", "kind", "expected"),
    [
        ("int4_group", "bfloat16", "int4"),
        ("int4_group", "Q8_0", "int4"),
        ("int4_group", "Q4_K", "stored"),
        ("int8", "bfloat16", "int8"),
        ("int8", "Q6_K", "stored"),
        ("int8", "Q4_1", "stored"),
        ("torch_int8", "bfloat16", "int8"),
        ("torch_int8", "Q8_0", "int8"),
        ("torch_int8", "Q4_1", "int8"),
        ("dense", "Q8_0", "stored"),
    ],
)
def test_a_named_method_says_its_width(avx2, model, method, kind, expected) -> None:
    found = plan(avx2, stored(model, kind), wishes(linear_method=method))
    assert (found.linear_method, found.quantization) == (method, expected)


@pytest.mark.parametrize(
    ("method", "asked", "sentence"),
    [
        ("dense", "int8", "dense stores bfloat16 weights without rounding them; .* 8 bits"),
        ("dense_native", "int4", "dense_native stores .* without rounding .* 4 bits"),
        ("int4_group", "int8", "int4_group rounds weights to 4 bits; --quantization int8 asks"),
        ("int8", "int4", "int8 rounds weights to 8 bits; --quantization int4 asks for 4 bits"),
        ("torch_int8", "int4", "torch_int8 rounds weights to 8 bits"),
    ],
)
def test_a_method_and_a_width_that_contradict_are_an_error(
    avx2, model, method, asked, sentence
) -> None:
    with pytest.raises(PlanError, match=sentence) as caught:
        plan(avx2, model, wishes(linear_method=method, quantization=asked))
    assert [refusal.rule for refusal in caught.value.refusals] == ["quantization"]
    assert f"--quantization {asked} with --linear-method {method} cannot run" in str(caught.value)
    assert (
        caught.value.nearest == "--linear-method " + {"int8": "int8", "int4": "int4_group"}[asked]
    )


def test_without_native_kernels_8_bits_come_from_torch(avx2, model) -> None:
    found = plan(without_kernels(avx2), model, wishes(quantization="int8"))
    assert outcome(found) == ("torch_int8", "int8", "user")
    assert refused(found)["linear/int8"] == {"native_kernels.missing"}
    assert refused(found)["linear/dense"] == {"quantization"}
    assert any("one scale for each output, as asked" in note for note in found.notes)


def test_without_native_kernels_4_bits_are_an_error_that_offers_8(avx2, model) -> None:
    with pytest.raises(PlanError, match="no c\\+\\+ in PATH") as caught:
        plan(without_kernels(avx2), model, wishes(quantization="int4"))
    assert caught.value.nearest == "--quantization int8"
    assert {refusal.rule for refusal in caught.value.refusals} == {"native_kernels.missing"}


def test_without_avx2_nothing_has_8_bits(avx2, model) -> None:
    poor = replace(avx2, cpu=replace(avx2.cpu, isa=()))
    with pytest.raises(PlanError, match="torch_int8 needs the CPU flags avx2") as caught:
        plan(poor, model, wishes(quantization="int8"))
    assert caught.value.nearest == "--quantization auto"


def test_on_a_card_no_width_can_be_had_yet(model) -> None:
    with pytest.raises(PlanError, match="int8 needs a cpu device") as caught:
        plan(load_hardware("h100"), model, wishes(quantization="int8"))
    assert caught.value.nearest in ("--quantization auto", "--device cpu")


def test_auto_never_rounds_where_no_kernel_reads_the_file(avx2, model) -> None:
    for kind in ("Q8_0", "Q4_K", "bfloat16"):
        found = plan(without_kernels(avx2), stored(model, kind), wishes())
        assert (found.linear_method, found.quantization) == ("dense", "stored")
        assert refused(found)["linear/torch_int8"] == {"rank"}


def test_another_width_is_another_fingerprint_and_less_memory(avx2, model) -> None:
    found = {w: plan(avx2, model, wishes(quantization=w)) for w in ("auto", "int8", "int4")}
    assert len({p.fingerprint() for p in found.values()}) == 3
    sizes = [found[w].memory.weights_bytes for w in ("auto", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    # linear layers: 106 million weights of 16, 8.5 and 5 bits; embedding: 28 million of 8.5
    assert sizes[0] == 269_030_016 and 142e6 < sizes[1] < 144e6 and 95e6 < sizes[2] < 97e6
    kept = stored(model, "Q4_1", 98_000_000)
    same = [plan(avx2, kept, wishes(quantization=w)).memory for w in ("auto", "int8", "int4")]
    assert same[0] == same[1] == same[2]


def test_notes_say_what_is_rounded_to_what(avx2, model) -> None:
    notes = " ".join(plan(avx2, model, wishes(quantization="int4")).notes)
    assert "bfloat16 weights of linear layers are rounded to 4 bits in groups of 32" in notes
    assert "the embedding to 8 bits in groups of 32, as asked" in notes
    assert "activations are rounded to 8 bits" in notes
    untied = replace(model, tie_word_embeddings=False)
    notes = " ".join(plan(avx2, untied, wishes(quantization="int8")).notes)
    assert "linear layers and embedding and output layer are rounded to 8 bits" in notes


def test_a_mixed_file_is_said_and_counted_type_by_type(avx2, model) -> None:
    mixed = replace(model, stored_dtype="Q4_K", weight_bytes=95_100_000, stored_types=MIXED)
    found = plan(avx2, mixed, wishes())
    assert (found.linear_method, found.quantization) == ("int4_group", "stored")
    notes = " ".join(found.notes)
    for part in ("Q4_K weights are repacked", "Q6_K weights are repacked", "Q5_0 weights run as"):
        assert part in notes
    by_type = 60_000_000 * 160 // 144 + 30_000_000 * 272 // 210 + 5_000_000 * 34 // 22
    assert found.memory.weights_bytes == by_type + 100_000  # norms
    rounded = " ".join(plan(avx2, mixed, wishes(quantization="int4")).notes)
    assert "Q6_K weights of linear layers are rounded to 4 bits" in rounded
    assert "Q4_K weights are repacked" in rounded


def test_an_unknown_width_lists_the_known_ones(avx2, model) -> None:
    with pytest.raises(PlanError, match=r"--quantization 'int3' is unknown; .* auto, int8, int4"):
        plan(avx2, model, wishes(quantization="int3"))
