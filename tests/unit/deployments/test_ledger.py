"""The books of all keys: limits over any minute, settling, concurrency, gateways that die."""

from __future__ import annotations

import random

import pytest

from polypath.deployments.ledger import SILENT_S, Excess, KeyLimits, Ledger, Measure, Reservation
from polypath.deployments.rate_headers import duration
from polypath.deployments.rate_window import RateWindow


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def test_no_sixty_seconds_hold_more_than_the_limit() -> None:
    rng = random.Random(7)
    window, limit, now_s = RateWindow(), 100, 0.0
    spent: list[tuple[float, int]] = []
    for _ in range(3000):
        now_s += rng.expovariate(3.0)
        amount = rng.randint(1, 12)
        if window.spent(now_s) + amount <= limit:
            window.add(now_s, amount)
            spent.append((now_s, amount))
    for at_s, _ in spent:
        assert sum(amount for when_s, amount in spent if at_s <= when_s < at_s + 60) <= limit
    # And little is lost to the slots of one second: 61 s hold what 60 could.
    assert sum(amount for _, amount in spent) >= 0.9 * limit * now_s / 61


def test_the_wait_is_over_exactly_when_it_fits() -> None:
    window = RateWindow()
    for second in range(10):
        window.add(second + 0.5, 10)
    wait_s = window.wait_s(9.5, 25, 100)  # the slots of seconds 0, 1 and 2 have to go
    assert 9.5 + wait_s == 63
    assert window.wait_s(62.9, 25, 100) > 0
    assert window.wait_s(63.0, 25, 100) == 0


def test_requests_and_their_reset() -> None:
    clock = Clock()
    ledger, limits = Ledger(clock), KeyLimits(requests_per_minute=2)
    first = ledger.enter("g", "k", limits)
    assert not isinstance(first, Excess)
    assert (first.requests, first.running) == (1, 1)
    ledger.enter("g", "k", limits)
    refused = ledger.enter("g", "k", limits)
    assert isinstance(refused, Excess)
    assert (refused.measure, refused.used) == (Measure.REQUESTS, 2)
    assert refused.standing.requests == 2  # what is refused does not count
    clock.now_s += refused.wait_s
    assert not isinstance(ledger.enter("g", "k", limits), Excess)


def test_keys_do_not_share_limits() -> None:
    ledger, limits = Ledger(Clock()), KeyLimits(requests_per_minute=1)
    assert not isinstance(ledger.enter("g", "a", limits), Excess)
    assert not isinstance(ledger.enter("g", "b", limits), Excess)
    assert isinstance(ledger.enter("g", "a", limits), Excess)


@pytest.mark.parametrize(("used", "left"), [(30, 70), (60, 40), (80, 20)])
def test_a_reservation_becomes_what_was_used(used: int, left: int) -> None:
    ledger, limits = Ledger(Clock()), KeyLimits(tokens_per_minute=100)
    held = ledger.reserve("k", limits, 60)
    assert isinstance(held, Reservation)
    refused = ledger.reserve("k", limits, 41)
    assert isinstance(refused, Excess)
    assert (refused.measure, refused.used, refused.asked) == (Measure.TOKENS, 60, 41)
    ledger.settle("k", held, used)
    assert isinstance(ledger.reserve("k", limits, left + 1), Excess)
    assert isinstance(ledger.reserve("k", limits, left), Reservation)


def test_settling_after_a_minute_gives_nothing_back_twice() -> None:
    clock = Clock()
    ledger, limits = Ledger(clock), KeyLimits(tokens_per_minute=100)
    held = ledger.reserve("k", limits, 60)
    assert isinstance(held, Reservation)
    clock.now_s += 90
    assert isinstance(ledger.reserve("k", limits, 100), Reservation)
    ledger.settle("k", held, 10)
    assert isinstance(ledger.reserve("k", limits, 1), Excess)


def test_what_was_reserved_in_lost_books_is_spent_when_it_is_used() -> None:
    held = Ledger(Clock()).reserve("k", KeyLimits(tokens_per_minute=100), 60)
    assert isinstance(held, Reservation)
    ledger, limits = Ledger(Clock()), KeyLimits(tokens_per_minute=100)
    assert isinstance(ledger.reserve("k", limits, 50), Reservation)
    ledger.settle("k", held, 30)
    assert ledger.standing("k").tokens == 80


def test_concurrency_counts_over_gateways() -> None:
    ledger, limits = Ledger(Clock()), KeyLimits(max_concurrent=2)
    for gateway in ("a", "b"):
        assert not isinstance(ledger.enter(gateway, "k", limits), Excess)
    refused = ledger.enter("a", "k", limits)
    assert isinstance(refused, Excess)
    assert (refused.measure, refused.used) == (Measure.CONCURRENCY, 2)
    ledger.leave("b", "k")
    assert not isinstance(ledger.enter("a", "k", limits), Excess)


def test_what_a_dead_gateway_ran_is_free_again() -> None:
    clock = Clock()
    ledger, limits = Ledger(clock), KeyLimits(max_concurrent=1)
    ledger.enter("dead", "k", limits)
    assert isinstance(ledger.enter("alive", "k", limits), Excess)
    clock.now_s += SILENT_S + 1
    assert not isinstance(ledger.enter("alive", "k", limits), Excess)
    assert ledger.num_gateways() == 1


def test_a_new_ledger_learns_what_runs() -> None:
    clock = Clock()
    ledger, limits = Ledger(clock), KeyLimits(max_concurrent=3)
    ledger.renew("a", {"k": 2})
    ledger.renew("b", {"k": 1})
    assert isinstance(ledger.enter("b", "k", limits), Excess)
    ledger.renew("a", {"k": 0})  # from a gateway it knows this is only a sign of life
    assert isinstance(ledger.enter("b", "k", limits), Excess)
    for _ in range(9):  # more than ever entered: never below nothing
        ledger.leave("a", "k")
    assert not isinstance(ledger.enter("b", "k", limits), Excess)
    assert not isinstance(ledger.enter("b", "k", limits), Excess)
    assert isinstance(ledger.enter("b", "k", limits), Excess)


def test_shares_of_limits_are_never_nothing() -> None:
    limits = KeyLimits(requests_per_minute=9, tokens_per_minute=None, max_concurrent=1)
    assert limits.divided(2) == KeyLimits(requests_per_minute=4, max_concurrent=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (1.42, "1.5s"), (59.99, "60s"), (60, "1m0s")],
)
def test_durations_read_as_openais(seconds: float, text: str) -> None:
    assert duration(seconds) == text
