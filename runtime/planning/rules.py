"""The rules that refuse a candidate: small pure functions in one table; none knows another.

A rule looks at one capability record and one `Situation` and answers with a refusal or None, so the
order in the table decides nothing but the order of the sentences. docs/paths.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..forward_mode import ForwardMode
from .capability import Capability
from .refusal import Refusal
from .rule import Rule, ask_all
from .rules_model import MODEL_RULES, PAIR_RULES
from .rules_node import NODE_RULES, native_variant
from .situation import Situation

__all__ = ["RULES", "Situation", "native_variant", "why_not", "why_not_together"]

RULES: tuple[Rule[Capability, Situation], ...] = (*NODE_RULES, *MODEL_RULES)


def why_not(capability: Capability, situation: Situation) -> list[Refusal]:
    """Every refusal, in the order of the table; empty means it fits."""
    return ask_all(RULES, capability, situation)


def why_not_together(
    runner: Capability, others: Iterable[Capability], mode: ForwardMode
) -> Refusal | None:
    """Why a runner cannot launch an attention backend, ops table or linear method in a mode."""
    for other in others:
        for refusal in ask_all(PAIR_RULES, runner, other, mode):
            return refusal
    return None
