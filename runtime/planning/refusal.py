"""Why a candidate does not run here: a rule, its class, one sentence, and what would lift it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

RefusalKind = Literal["correctness", "unavailable", "untested", "performance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One rule that said no.

    `correctness`: it would compute something wrong. `unavailable`: hardware, package, compiler or
    code is missing. `untested`: nobody has compared it with the yardstick here. `performance`: it
    works and would be a poor choice.
    """

    rule: str  # dotted id that the docs list, such as "compute_capability.min"
    kind: RefusalKind
    sentence: str  # what is missing and what was found
    lift: str  # what would make the rule say yes

    def __post_init__(self) -> None:
        assert self.kind in get_args(RefusalKind), f"a refusal of unknown class {self.kind!r}"
        assert self.rule, "a refusal names its rule"
        assert self.sentence and self.lift, f"refusal {self.rule} says why and what would lift it"

    def to_json(self) -> dict[str, str]:
        """Its four fields as plain strings."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Refusal:
        """Inverse of `to_json`; an unknown key is a TypeError."""
        return cls(**data)  # pyright: ignore[reportArgumentType]  # kind is checked above
