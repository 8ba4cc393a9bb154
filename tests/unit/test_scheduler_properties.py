"""Any mix of requests, arrivals, cancels and pool sizes: the scheduler's promises always hold.

No tensors: a dictionary stands for the KV pool and holds, for every slot, all tokens up to it.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from polypath.runtime.kv.pages import SCRATCH_PAGE, Pages
from polypath.runtime.request import Request, SamplingParams
from polypath.runtime.scheduler import RequestState, ScheduledRow, Scheduler


class _Life:
    """A scheduler under random load, checked after every step."""

    def __init__(
        self, *, seed: int, pages: int, page_size: int, seqs: int, budget: int, cache: bool
    ) -> None:
        self.rng = Random(seed)
        self.context = pages * page_size
        self.scheduler = Scheduler(
            Pages(pages + 1, page_size, prefix_cache=cache),
            max_model_len=self.context,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
        )
        self.page_size = page_size
        self.slots: dict[int, tuple[int, ...]] = {}
        self.ended: Counter[str] = Counter()
        self.first_runs: list[RequestState] = []
        self.arrived: list[RequestState] = []
        self.computed = 0

    def arrive(self, name: str) -> None:
        """A random request; most begin alike, so that prefixes are often shared."""
        longest = self.rng.choice([3 * self.page_size + 5, self.context - 1])
        num_prompt = self.rng.randint(1, min(self.context - 1, longest))
        num_common = self.rng.randint(0, num_prompt)
        prompt = [(i * i) % 3 for i in range(num_common)]
        prompt += [self.rng.randint(0, 1) for _ in range(num_prompt - num_common)]
        outputs = self.rng.choice([1, 2, 5, 20, None])
        request = Request(
            id=name,
            prompt_ids=tuple(prompt),
            priority=self.rng.choice([0, 0, 0, -1, 1]),
            sampling=SamplingParams(
                max_tokens=outputs, prompt_logprobs=self.rng.choice([None, None, 0])
            ),
        )
        self.scheduler.check(request)
        self.arrived.append(self.scheduler.add(request))

    def step(self) -> None:
        """Schedule, check, write, draw."""
        rows = self.scheduler.schedule()
        assert rows, "there is work, so something must run"
        self._check_rows(rows)
        for row in rows:
            self._write(row)
        self._check_pages()
        for row in rows:
            self._advance(row)

    def _check_rows(self, rows: list[ScheduledRow]) -> None:
        scheduler = self.scheduler
        assert sum(row.num_tokens for row in rows) <= scheduler.max_num_batched_tokens
        assert all(row.num_tokens > 0 for row in rows)
        assert len({row.state.request.id for row in rows}) == len(rows)
        assert len(rows) <= scheduler.num_running <= scheduler.max_num_seqs

    def _write(self, row: ScheduledRow) -> None:
        """Earlier tokens must lie where this row will read them; then write its own."""
        state = row.state
        end = state.num_computed + row.num_tokens
        assert end <= len(state.token_ids)
        assert len(state.pages) >= self.scheduler.pages.pages_for(end)
        for position in range(end):
            slot = state.pages[position // self.page_size] * self.page_size
            slot += position % self.page_size
            content = tuple(state.token_ids[: position + 1])
            if position < state.num_computed:
                assert self.slots[slot] == content, "another request has written here"
            else:
                page = state.pages[position // self.page_size]
                assert self.scheduler.pages.count(page) == 1, "a shared page is never written"
                self.slots[slot] = content

    def _check_pages(self) -> None:
        """Every page is held as often as it is counted; none is lost."""
        owned: Counter[int] = Counter()
        for state in self.scheduler.states():
            assert len(set(state.pages)) == len(state.pages)
            owned.update(state.pages)
        pages = self.scheduler.pages
        assert SCRATCH_PAGE not in owned
        assert all(pages.count(p) == owned[p] for p in range(1, pages.num_usable + 1))
        assert pages.num_used == len(owned)

    def _advance(self, row: ScheduledRow) -> None:
        state, samples = row.state, row.samples
        state.steps["any", "any", "any"] += 1
        if state not in self.first_runs:
            self.first_runs.append(state)
        self.computed += row.num_tokens
        self.scheduler.advance(row)
        self.scheduler.remember(row)
        if state.num_uncomputed:
            return
        if samples:
            state.token_ids.append(self.rng.randint(0, 1))
        state.has_prompt_logprobs = True
        if state.num_outputs >= state.max_outputs:
            self.scheduler.finish(state)
            self.ended["finished"] += 1

    def cancel_someone(self) -> None:
        """Anyone who is there."""
        states = list(self.scheduler.states())
        if states:
            self.scheduler.cancel(self.rng.choice(states).request.id)
            self.ended["cancelled"] += 1

    def check_end(self, num_requests: int) -> None:
        """All ended, all pages back, nobody of one priority started before an earlier one."""
        assert self.ended.total() == num_requests
        assert self.scheduler.pages.num_used == 0
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_usable
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        for priority in (-1, 0, 1):
            of_one = [s.arrival for s in self.first_runs if s.request.priority == priority]
            assert of_one == sorted(of_one)


def _live(life: _Life, num_requests: int) -> None:
    arrived, steps = 0, 0
    while arrived < num_requests or life.scheduler.has_work():
        if arrived < num_requests and (not life.scheduler.has_work() or life.rng.random() < 0.5):
            life.arrive(f"r{arrived}")
            arrived += 1
            continue
        if life.rng.random() < 0.03:
            life.cancel_someone()
        if life.scheduler.has_work():
            life.step()
            steps += 1
        assert steps < 100 * num_requests + 1000, "it does not come to an end"
    life.check_end(num_requests)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 200),
    pages=st.integers(2, 24),
    page_size=st.sampled_from([1, 2, 4, 16]),
    seqs=st.integers(1, 12),
    budget=st.integers(1, 64),
    cache=st.booleans(),
)
@example(seed=1, num_requests=200, pages=4, page_size=4, seqs=8, budget=8, cache=True)
@example(seed=15, num_requests=200, pages=24, page_size=4, seqs=9, budget=5, cache=True)
@example(seed=2, num_requests=200, pages=2, page_size=16, seqs=4, budget=7, cache=True)
def test_every_request_ends_and_no_page_is_owned_twice_or_lost(
    seed: int,
    num_requests: int,
    pages: int,
    page_size: int,
    seqs: int,
    budget: int,
    cache: bool,
) -> None:
    life = _Life(seed=seed, pages=pages, page_size=page_size, seqs=seqs, budget=budget, cache=cache)
    _live(life, num_requests)


def test_tiny_pools_preempt_and_share() -> None:
    life = _Life(seed=7, pages=8, page_size=4, seqs=8, budget=16, cache=True)
    _live(life, 200)
    assert life.scheduler.num_preemptions > 10
    assert life.scheduler.num_cached_tokens > 10
    assert life.ended["finished"] > 100


def test_preempting_again_and_again_does_not_eat_the_work() -> None:
    """Tokens computed stay within a few times those that a pool without limits would compute."""
    life = _Life(seed=3, pages=8, page_size=4, seqs=8, budget=16, cache=False)
    _live(life, 200)
    needed = sum(len(state.token_ids) for state in life.arrived)
    print(f"{life.computed} tokens computed for {needed}")
    assert life.computed < 3 * needed
