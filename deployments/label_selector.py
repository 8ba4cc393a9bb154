"""Ray's label selectors: `x`, `!x`, `in(x,y)` and `!in(x,y)` on one label of a node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_VALUE = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:[a-z0-9A-Z.-]{{1,253}}/)?{_VALUE}")
_RULE = re.compile(rf"(?P<not>!?)(?:in\((?P<list>{_VALUE}(?:, ?{_VALUE})*)\)|(?P<one>{_VALUE}))")
FORMS = "x, !x, in(x,y) or !in(x,y)"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelRule:
    """Which values of one label fit. A node without the label fits only a negated rule."""

    values: tuple[str, ...]
    is_negated: bool

    def fits(self, value: str | None) -> bool:
        """Whether a node with this value (None: without the label) may be used."""
        return (value in self.values) != self.is_negated


def why_not_key(key: str) -> str | None:
    """What is wrong with a label's name; None when Ray takes it."""
    if _KEY.fullmatch(key):
        return None
    return f"{key!r} is no name of a label: letters, digits, - _ . and at most 63 characters"


def parse_rule(text: str) -> LabelRule:
    """A selector's right side. Raises ValueError with the forms that there are."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no label selector; write {FORMS}")
    listed = found["list"]
    values = re.split(r", ?", listed) if listed else [found["one"]]
    return LabelRule(values=tuple(values), is_negated=bool(found["not"]))


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels fits every part of the selector."""
    return all(parse_rule(text).fits(labels.get(key)) for key, text in selector.items())
