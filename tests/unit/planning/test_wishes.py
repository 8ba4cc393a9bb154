"""A wish for each mode, hybrid plans, and which of several packages a backend comes from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polypath.runtime.errors import PlanError
from polypath.runtime.forward_mode import ForwardMode
from polypath.runtime.planning.hardware import Hardware, Package, load_hardware
from polypath.runtime.planning.planner import plan
from polypath.runtime.planning.wishes import names_in, wish_of

from .asking import refused, wishes

DECODE, PREFILL, MIXED = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.MIXED


@pytest.mark.parametrize(
    ("text", "decode", "prefill", "mixed"),
    [
        ("auto", "auto", "auto", "auto"),
        ("a", "a", "a", "a"),
        ("prefill=a,decode=b", "b", "a", "a"),
        ("prefill=a, mixed=c", "auto", "a", "c"),
        ("decode=b", "b", "auto", "auto"),
    ],
)
def test_mixed_follows_prefill_and_the_rest_is_auto(
    text: str, decode: str, prefill: str, mixed: str
) -> None:
    assert [wish_of(text, mode) for mode in (DECODE, PREFILL, MIXED)] == [decode, prefill, mixed]
    assert set(names_in(text)) >= {decode, prefill, mixed} - {"auto"}


@pytest.mark.parametrize("text", ["verify=a", "decode=", "decode=a,decode=b", "a,decode=b", "=a"])
def test_a_wish_that_makes_no_sense_is_an_error(text: str) -> None:
    with pytest.raises(PlanError, match="MODE=NAME"):
        wish_of(text, DECODE)


def with_packages(name: str, **versions: str) -> Hardware:
    hardware = load_hardware(name)
    found = {package: Package(version=version) for package, version in versions.items()}
    return replace(hardware, packages=hardware.packages | found)


def test_modes_may_attend_by_different_backends(model) -> None:
    hardware = with_packages("h200", vllm="0.25.1")
    config = wishes(attention_backend="prefill=vllm_flash_attn,decode=flashinfer")
    found = plan(hardware, replace(model, head_dim=64), config)
    by_mode = {mode: path.attention_backend for mode, path in found.paths.items()}
    assert by_mode == {DECODE: "flashinfer", PREFILL: "vllm_flash_attn", MIXED: "vllm_flash_attn"}
    assert found.paths[DECODE].runner == "cuda_graph"
    assert found.paths[PREFILL].runner == "piecewise_cuda_graph"
    assert found.origins["attention_backend"] == "user"
    assert (
        "hybrid attention over one KV pool: flashinfer for decode, "
        "vllm_flash_attn for prefill and mixed batches" in found.notes
    )


def test_an_unknown_backend_of_one_mode_is_named(model) -> None:
    with pytest.raises(PlanError, match="'flashinfr' is unknown"):
        plan(load_hardware("h200"), model, wishes(attention_backend="decode=flashinfr"))


def test_a_backend_that_one_mode_cannot_have_is_refused_with_what_works(model) -> None:
    config = wishes(attention_backend="prefill=vllm_flash_attn,decode=torch_sdpa")
    with pytest.raises(PlanError, match="vllm is not installed"):
        plan(load_hardware("h200"), model, config)


@pytest.mark.parametrize(
    ("profile", "versions", "carrier", "page_size"),
    [
        ("h200", {"vllm": "0.25.1"}, "vllm", 16),
        ("a100-80", {"flash_attn": "2.8.3.post2"}, "flash_attn>=2.8", 256),
        ("h200", {"flash_attn_interface": "3.0.0b1"}, "flash_attn_interface", 16),
    ],
)
def test_the_plan_names_the_package_and_those_passed_over(
    model, profile: str, versions: dict[str, str], carrier: str, page_size: int
) -> None:
    config = wishes(attention_backend="vllm_flash_attn")
    found = plan(with_packages(profile, **versions), model, config)
    (note,) = [n for n in found.notes if n.startswith("vllm_flash_attn comes from")]
    assert note.startswith(f"vllm_flash_attn comes from {carrier}")
    assert carrier == "vllm" or "vllm is not installed" in note
    assert found.page_size == page_size


@pytest.mark.parametrize(
    ("profile", "versions", "reason"),
    [
        ("h200", {}, "vllm is not installed"),
        ("h200", {"vllm_flash_attn": "2.6.2"}, "built for torch 2.4.0 alone, not 2.11.0"),
        ("a100-80", {"flash_attn_interface": "3.0.0b1"}, "needs compute capability 9.x, not 8.0"),
        ("a100-80", {"flash_attn": "2.7.4"}, "flash_attn 2.7.4 is older than 2.8"),
    ],
)
def test_a_card_that_no_package_fits_says_why_of_each(
    model, profile: str, versions: dict[str, str], reason: str
) -> None:
    found = plan(with_packages(profile, **versions), model, wishes())
    assert "package" in refused(found)["attention/vllm_flash_attn"]
    (sentence,) = {
        refusal.sentence
        for item in found.rejected
        if item.candidate == "vllm_flash_attn"
        for refusal in item.refusals
        if refusal.rule == "package"
    }
    assert reason in sentence and sentence.count(";") >= 4


def test_a_named_library_counts_as_a_package(model) -> None:
    config = wishes(
        attention_backend="vllm_flash_attn", flash_attn_library="/opt/_vllm_fa3_C.abi3.so"
    )
    found = plan(load_hardware("h200"), model, config)
    assert found.flash_attn_library == "/opt/_vllm_fa3_C.abi3.so"
    assert any("comes from flash_attn_library" in note for note in found.notes)
    with pytest.raises(PlanError, match=r"compute capability 9\.x"):
        plan(load_hardware("a100-80"), model, config)
