"""What is proposed where a model does not fit: it is planned before it is named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from polypath.runtime.config import ModelConfig
from polypath.runtime.errors import PlanError
from polypath.runtime.planning.hardware import Hardware, load_hardware
from polypath.runtime.planning.planner import plan
from polypath.tests.unit.planning.asking import wishes
from polypath.tests.unit.planning.public_models import public_model


def proposals(node: Hardware, model: ModelConfig, **options: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(node, model, wishes(**options))
    assert [refusal.rule for refusal in caught.value.refusals] == ["memory"]
    *found, last = str(caught.value.nearest).split(", or ")
    assert last.endswith("of free memory")
    return found


def options_of(proposal: str) -> dict[str, Any]:
    """The options in a proposal, as EngineConfig has them."""
    pairs = re.findall(r"--([a-z-]+) (\w+)", proposal.partition(" (")[0])
    return {k.replace("-", "_"): int(v) if v.isdigit() else v for k, v in pairs}


@pytest.mark.parametrize(
    ("node", "model", "stored"),
    [
        ("t4", "Llama-3.1-8B", ("bfloat16", 16.0)),
        ("t4", "Llama-3.1-8B", ("Q4_K", 4.85)),
        ("h100", "Llama-3.3-70B", ("bfloat16", 16.0)),
        ("rtx5090", "Qwen3-32B", ("bfloat16", 16.0)),
        ("a10g", "Qwen3-32B", ("Q4_0", 4.5)),
        ("epyc-avx2", "Qwen3-32B", ("bfloat16", 16.0)),
    ],
)
def test_each_proposal_fits(node: str, model: str, stored: tuple[str, float]) -> None:
    hardware, config = load_hardware(node), public_model(model, *stored)
    found = proposals(hardware, config)
    assert len(found) <= 3
    for proposal in found:
        options = options_of(proposal)
        assert options, proposal
        fitting = plan(hardware, config, wishes(**options))
        assert fitting.memory.total_bytes <= (fitting.memory.limit_bytes or 0)
        assert f"{fitting.max_model_len} tokens of context" in proposal


def test_a_long_context_is_answered_with_the_longest_that_fits() -> None:
    node, model = load_hardware("a10g"), public_model("Llama-3.1-8B")
    (proposal,) = proposals(node, model, max_model_len=131_072)
    longest = options_of(proposal)["max_model_len"]
    assert plan(node, model, wishes(max_model_len=longest)).max_model_len == longest
    assert 4096 < longest < 131_072


def test_what_no_wish_can_mend_is_answered_with_the_memory_it_takes(avx2) -> None:
    small = replace(avx2, memory=replace(avx2.memory, total_bytes=10**9, free_bytes=10**9))
    assert proposals(small, public_model("Llama-3.1-8B")) == []
