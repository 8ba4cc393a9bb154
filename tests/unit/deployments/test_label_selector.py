"""Label selectors mean what Ray means by them (tests/ray/test_pools.py asks Ray itself)."""

from __future__ import annotations

import pytest

from polypath.deployments.label_selector import matches, parse_rule, why_not_key


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "a", False),
        ("!a", "b", True),
        ("!a", None, True),
        ("in(a,b)", "b", True),
        ("in(a, b)", "c", False),
        ("!in(a,b)", "b", False),
        ("!in(a,b)", None, True),
        ("in-house", "in-house", True),
    ],
)
def test_a_rule_fits_a_value(rule: str, value: str | None, expected: bool) -> None:
    assert parse_rule(rule).fits(value) is expected


@pytest.mark.parametrize("rule", ["", "in()", "in(a", "a,b", "!!a", "a b", "-a", "x" * 64])
def test_what_ray_would_not_take_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="is no label selector"):
        parse_rule(rule)


def test_every_part_of_a_selector_must_fit() -> None:
    labels = {"zone": "a", "pool": "cpu"}
    assert matches({"zone": "in(a,b)", "pool": "!gpu"}, labels)
    assert not matches({"zone": "a", "pool": "gpu"}, labels)


def test_names_of_labels_are_checked() -> None:
    assert why_not_key("ray.io/node-id") is None
    assert why_not_key("a b") is not None
