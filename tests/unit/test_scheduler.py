"""The scheduler's order: who runs, who waits, who gives way."""

from __future__ import annotations

import pytest

from polypath.runtime.errors import ContextLengthError
from polypath.runtime.kv.pages import Pages
from polypath.runtime.request import Request, SamplingParams
from polypath.runtime.scheduler import ScheduledRow, Scheduler

PAGE = 4


def _scheduler(
    *, pages: int = 40, seqs: int = 8, budget: int = 64, length: int | None = None
) -> Scheduler:
    return Scheduler(
        Pages(pages + 1, PAGE),
        max_model_len=length or pages * PAGE,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
    )


def _add(scheduler: Scheduler, name: str, num_prompt: int, *, priority: int = 0) -> None:
    ids = tuple(sum(name.encode()) + i for i in range(num_prompt))
    scheduler.add(Request(id=name, prompt_ids=ids, priority=priority))


def _step(scheduler: Scheduler) -> dict[str, int]:
    """Schedule, pretend to compute and draw; who ran with how many tokens."""
    rows = scheduler.schedule()
    for row in rows:
        scheduler.advance(row)
        scheduler.remember(row)
        if not row.state.num_uncomputed:
            row.state.token_ids.append(1)
    return {row.state.request.id: row.num_tokens for row in rows}


def test_an_empty_scheduler_schedules_nothing() -> None:
    scheduler = _scheduler()
    assert not scheduler.has_work()
    assert scheduler.schedule() == []


def test_prefills_within_the_budget_in_order_of_arrival() -> None:
    scheduler = _scheduler(budget=16)
    for name in "abc":
        _add(scheduler, name, 10)
    assert _step(scheduler) == {"a": 10, "b": 6}
    assert _step(scheduler) == {"a": 1, "b": 4, "c": 10}
    assert _step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_decodes_go_before_prefills() -> None:
    scheduler = _scheduler(budget=4, seqs=4)
    _add(scheduler, "a", 1)
    _step(scheduler)
    _add(scheduler, "long", 50, priority=-1)
    assert _step(scheduler) == {"a": 1, "long": 3}
    assert _step(scheduler) == {"a": 1, "long": 3}


def test_a_smaller_priority_is_admitted_first() -> None:
    scheduler = _scheduler(seqs=1)
    for name, priority in (("late", 5), ("early", -5), ("middle", 0)):
        _add(scheduler, name, 3, priority=priority)
    assert _step(scheduler) == {"early": 3}


def test_runs_no_more_requests_than_allowed() -> None:
    scheduler = _scheduler(seqs=2)
    for name in "abc":
        _add(scheduler, name, 3)
    assert _step(scheduler).keys() == {"a", "b"}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.cancel("a")
    assert _step(scheduler).keys() == {"b", "c"}


def test_nobody_overtakes_a_large_request_that_waits_for_pages() -> None:
    scheduler = _scheduler(pages=10)
    _add(scheduler, "a", 20)
    _step(scheduler)
    _add(scheduler, "large", 32)
    _add(scheduler, "small", 2)
    assert _step(scheduler) == {"a": 1}
    scheduler.cancel("a")
    assert _step(scheduler) == {"large": 32, "small": 2}


def test_preempts_the_last_of_the_least_urgent_when_pages_run_out() -> None:
    scheduler = _scheduler(pages=9)
    _add(scheduler, "patient", 8, priority=1)
    _add(scheduler, "first", 8)
    _add(scheduler, "second", 8)
    assert [*_step(scheduler)] == ["first", "second", "patient"]
    seen = [_step(scheduler).keys() for _ in range(18)]
    assert scheduler.num_preemptions == 2
    gone = {
        name: next(i for i, s in enumerate(seen) if name not in s) for name in ("patient", "second")
    }
    assert gone["patient"] < gone["second"]
    assert all("first" in names for names in seen)


def test_a_decode_preempted_for_an_urgent_prefill_leaves_the_step_it_was_already_in() -> None:
    scheduler = _scheduler(pages=5, budget=2, seqs=2)
    _add(scheduler, "low", 2)
    _step(scheduler)
    _add(scheduler, "urgent", 12, priority=-1)
    ran: list[dict[str, int]] = []
    while not scheduler.num_preemptions:
        ran.append(_step(scheduler))
    assert ran == [{"low": 1, "urgent": 1}] * 8 + [{"urgent": 1}]


def test_a_preempted_request_computes_all_its_tokens_again_and_keeps_them() -> None:
    scheduler = _scheduler(pages=6)
    _add(scheduler, "a", 6)
    _add(scheduler, "b", 6)
    while not scheduler.num_preemptions:
        _step(scheduler)
    state = next(s for s in scheduler.states() if s.request.id == "b")
    outputs = list(state.output_ids)
    assert (state.num_computed, state.pages) == (0, [])
    scheduler.cancel("a")
    ran = _step(scheduler)["b"]
    assert ran + state.cached_tokens <= 6 + len(outputs)
    assert state.output_ids[: len(outputs)] == outputs


def test_finishing_and_cancelling_free_pages_and_a_second_time_is_nothing() -> None:
    scheduler = _scheduler()
    _add(scheduler, "a", 9)
    _add(scheduler, "b", 9)
    _step(scheduler)
    assert scheduler.pages.num_used > 0
    assert scheduler.cancel("a") is not None
    assert scheduler.cancel("a") is None
    assert scheduler.cancel("nobody") is None
    scheduler.cancel("b")
    assert scheduler.pages.num_used == 0
    assert not scheduler.has_work()


def test_draining_ends_everyone_and_tells() -> None:
    scheduler = _scheduler(seqs=1)
    for name in "abc":
        _add(scheduler, name, 9)
    _step(scheduler)
    told: list[str] = []
    scheduler.drain(lambda state: told.append(state.request.id))
    assert sorted(told) == ["a", "b", "c"]
    assert (scheduler.pages.num_used, scheduler.has_work()) == (0, False)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(16, None), (16, 5), (17, 0), (40, None)])
def test_refuses_what_the_context_cannot_hold(num_prompt: int, max_tokens: int | None) -> None:
    scheduler = _scheduler(length=16)
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(ContextLengthError, match=str(num_prompt)):
        scheduler.check(Request(id="a", prompt_ids=(1,) * num_prompt, sampling=params))


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(15, None), (15, 100), (16, 0)])
def test_takes_what_the_context_holds(num_prompt: int, max_tokens: int | None) -> None:
    scheduler = _scheduler(length=16)
    params = SamplingParams(max_tokens=max_tokens)
    scheduler.check(Request(id="a", prompt_ids=(1,) * num_prompt, sampling=params))


def test_a_row_samples_only_when_its_last_token_runs() -> None:
    scheduler = _scheduler(budget=5)
    _add(scheduler, "a", 10)
    samples: list[bool] = []
    for _ in range(3):
        rows: list[ScheduledRow] = scheduler.schedule()
        samples.append(rows[0].samples)
        scheduler.advance(rows[0])
        scheduler.remember(rows[0])
        if not rows[0].state.num_uncomputed:
            rows[0].state.token_ids.append(1)
    assert samples == [False, True, True]
