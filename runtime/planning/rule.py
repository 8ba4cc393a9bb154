"""A rule as data: its id, its class, what it refuses, who taught it, and the function that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVarTuple

from .refusal import Refusal, RefusalKind

Facts = TypeVarTuple("Facts")
Verdict = tuple[str, str]
"""What is missing and what was found; what would lift it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Generic[*Facts]):
    """One rule. Rules know nothing of each other, so no order among them decides anything."""

    id: str  # dotted, such as "compute_capability"
    kind: RefusalKind
    refuses: str  # for the docs: whom or what
    source: str  # the report or document that taught it
    check: Callable[[*Facts], Verdict | None]

    def ask(self, *facts: *Facts) -> Refusal | None:
        """The refusal, or None."""
        verdict = self.check(*facts)
        if verdict is None:
            return None
        sentence, lift = verdict
        return Refusal(rule=self.id, kind=self.kind, sentence=sentence, lift=lift)


def rule(
    id: str, kind: RefusalKind, *, refuses: str, source: str
) -> Callable[[Callable[[*Facts], Verdict | None]], Rule[*Facts]]:
    """Makes a rule of a function that answers with a sentence and a lift, or None."""

    def make(check: Callable[[*Facts], Verdict | None]) -> Rule[*Facts]:
        return Rule(id=id, kind=kind, refuses=refuses, source=source, check=check)

    return make


def ask_all(rules: Iterable[Rule[*Facts]], *facts: *Facts) -> list[Refusal]:
    """Every refusal, in the order of the rules."""
    found = [each.ask(*facts) for each in rules]
    return [refusal for refusal in found if refusal is not None]
