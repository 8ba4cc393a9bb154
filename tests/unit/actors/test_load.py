"""Rates weigh steps by their length and forget slowly; an idle worker keeps what it measured."""

from __future__ import annotations

import pytest

from polypath.actors.load import Rate


def test_a_rate_is_unknown_until_a_step_ran() -> None:
    assert Rate().tokens_s == 0.0


def test_a_rate_is_tokens_over_busy_time() -> None:
    rate = Rate()
    rate.add(100, 0.1)
    rate.add(1, 0.1)
    assert rate.tokens_s == pytest.approx(505, rel=0.01)


def test_a_rate_follows_a_change() -> None:
    rate = Rate()
    for _ in range(200):
        rate.add(100, 0.1)
    for _ in range(400):
        rate.add(10, 0.1)
    assert 100 <= rate.tokens_s <= 200
