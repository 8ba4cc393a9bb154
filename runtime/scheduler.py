"""Chooses the tokens of each step: continuous batching, chunked prefill under one token budget,
preemption by recompute.

No tensors here. Decodes go first, then prefills under way, then new requests, each group by
(priority, arrival).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from .errors import ContextLengthError
from .kv.pages import Pages
from .request import Request, TokenLogprob


class RequestState:
    """A request inside the engine: its tokens so far, how many of them are computed, and the pages
    that hold them.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "enqueued_s",
        "has_prompt_logprobs",
        "max_outputs",
        "num_computed",
        "num_pending",
        "num_prompt",
        "order",
        "pages",
        "prompt_logprobs",
        "request",
        "sampling",
        "steps",
        "token_ids",
    )

    def __init__(self, request: Request, arrival: int, max_model_len: int) -> None:
        self.request = request
        self.sampling = request.sampling
        self.arrival = arrival
        self.order = (request.priority, arrival)  # smaller is served first and preempted last
        self.enqueued_s = time.monotonic()
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0  # tokens whose keys and values are in `pages`, or will be soon
        self.num_pending = 0  # last tokens that are being drawn and not known here yet
        self.pages: list[int] = []
        self.cached_tokens = 0  # prompt tokens found in the prefix cache at first admission
        self.prompt_logprobs: list[TokenLogprob | None] = []
        wants = request.sampling.prompt_logprobs is not None
        self.has_prompt_logprobs = not wants or bool(request.output_ids)  # nothing left to collect
        self.steps: Counter[tuple[str, str, str]] = Counter()  # (mode, runner, reason)
        limit = request.sampling.max_tokens
        room = max_model_len - self.num_prompt
        self.max_outputs = room if limit is None else min(limit, room)

    @property
    def num_outputs(self) -> int:
        """Generated tokens, earlier ones of a resumed request and pending ones included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens, without the pending ones."""
        return len(self.token_ids) - self.num_pending

    @property
    def num_known_outputs(self) -> int:
        """Generated tokens, without the pending ones."""
        return len(self.token_ids) - self.num_pending - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be run through the model before the next one can be drawn."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens."""
        return self.token_ids[self.num_prompt : self.num_known]

    def expect(self, draw: int) -> None:
        """The `draw`-th token of its step is being drawn; till then -1 - draw stands for it."""
        self.token_ids.append(-1 - draw)
        self.num_pending += 1

    def resolve(self, token: int) -> None:
        """The first pending token is known."""
        self.token_ids[-self.num_pending] = token
        self.num_pending -= 1

    def drop_pending(self) -> None:
        """Forget the tokens that are being drawn."""
        if self.num_pending:
            del self.token_ids[-self.num_pending :]
            self.num_pending = 0

    def token_slice(self, num_tokens: int) -> list[int]:
        """The next `num_tokens` uncomputed tokens."""
        return self.token_ids[self.num_computed : self.num_computed + num_tokens]


@dataclass(slots=True)
class ScheduledRow:
    """One request's share of a step. Not frozen for the reason that `RequestOutput` is not."""

    state: RequestState
    num_tokens: int
    start: int = 0  # tokens computed before it; set when it is launched
    draw: int = -1  # which of its step's draws is this row's; -1: none

    @property
    def samples(self) -> bool:
        """Whether a token is drawn after this step."""
        state = self.state
        is_complete = state.num_computed + self.num_tokens == len(state.token_ids)
        return is_complete and state.num_outputs < state.max_outputs

    @property
    def num_prompt_logits(self) -> int:
        """Leading tokens of this row whose logits score the prompt token after them."""
        state = self.state
        if state.has_prompt_logprobs:
            return 0
        last = min(state.num_computed + self.num_tokens, state.num_prompt - 1)
        return max(0, last - state.num_computed)


class Scheduler:
    """Owns the waiting and the running requests and, through `Pages`, their memory."""

    def __init__(
        self, pages: Pages, *, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        capacity = pages.num_usable * pages.page_size
        assert capacity >= max_model_len, "the plan lets any one request fit the pool alone"
        self.pages = pages
        self.max_model_len = max_model_len
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # every decode gets its token
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.queue_time_s = 0.0  # moving average of how long admitted requests had waited
        self._arrivals = count()
        self._states: dict[str, RequestState] = {}
        self._waiting: list[tuple[tuple[int, int], RequestState]] = []
        self._running: dict[RequestState, None] = {}  # in order of admission

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place, preempted ones included."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._states)

    def num_queued_tokens(self) -> int:
        """Tokens to be computed before every request here decodes."""
        uncomputed = (state.num_uncomputed for state in self._states.values())
        return sum(tokens for tokens in uncomputed if tokens > 1)  # 1: a decode

    def oldest_wait_s(self) -> float:
        """How long the request that has waited longest has been waiting, in seconds."""
        now = time.monotonic()
        return max((now - state.enqueued_s for _, state in self._waiting), default=0.0)

    def add(self, request: Request) -> RequestState:
        """Queue a request that `check` has passed."""
        assert request.id not in self._states, f"request id {request.id} is in use"
        state = RequestState(request, next(self._arrivals), self.max_model_len)
        self._states[request.id] = state
        heapq.heappush(self._waiting, (state.order, state))
        return state

    def check(self, request: Request) -> None:
        """Raise ContextLengthError when the request can never run here."""
        num_prompt, limit = len(request.prompt_ids), self.max_model_len
        generates = request.sampling.max_tokens != 0
        if num_prompt + generates > limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, and this model's context holds {limit} "
                "tokens of prompt and "
                f"answer together; shorten the prompt to at most {limit - generates} tokens",
                "prompt",
                "context_length_exceeded",
            )
        num_tokens = num_prompt + len(request.output_ids)
        if num_tokens > limit:
            raise ContextLengthError(
                f"the prompt and the answer so far have {num_tokens} tokens, and this model's "
                f"context holds {limit}; resume on a worker with a longer context",
                "output_ids",
                "context_length_exceeded",
            )

    def has(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._states

    def cancel(self, request_id: str) -> RequestState | None:
        """Drop a request wherever it is and free its pages; None when unknown or ended."""
        state = self._states.get(request_id)
        if state is not None:
            self.finish(state)
        return state

    def runs(self, state: RequestState) -> bool:
        """Whether it still holds the pages of its last step: neither ended nor preempted since."""
        return state in self._running

    def finish(self, state: RequestState) -> None:
        """Take a request out and free its pages. A step that still runs on them is no danger: what
        is given to the device later comes after it.
        """
        del self._states[state.request.id]
        state.drop_pending()
        if state in self._running:
            del self._running[state]
            self._release(state)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not state]
            heapq.heapify(self._waiting)

    def schedule(self) -> list[ScheduledRow]:
        """The rows of the next step, within the token budget; empty when nothing can run."""
        rows: dict[str, ScheduledRow] = {}
        preempted = self.num_preemptions
        self._continue_running(rows)
        if self.num_preemptions == preempted:
            self._admit(rows)
        return list(rows.values())

    def _budget_left(self, rows: dict[str, ScheduledRow]) -> int:
        return self.max_num_batched_tokens - sum(row.num_tokens for row in rows.values())

    def _continue_running(self, rows: dict[str, ScheduledRow]) -> None:
        budget, preempted = self.max_num_batched_tokens, self.num_preemptions
        for state in sorted(self._running, key=_decodes_first):
            if state not in self._running:  # preempted for an earlier one
                continue
            num_tokens = min(state.num_uncomputed, budget)
            if num_tokens == 0 or (
                state.num_pending and state.num_outputs >= state.max_outputs
            ):  # no budget is left, or its last step runs already
                continue
            if self._secure_pages(state, num_tokens, rows):
                rows[state.request.id] = ScheduledRow(state, num_tokens)
                budget -= num_tokens
            if self.num_preemptions != preempted:  # rows may have gone again
                budget, preempted = self._budget_left(rows), self.num_preemptions

    def _secure_pages(
        self, state: RequestState, num_tokens: int, rows: dict[str, ScheduledRow]
    ) -> bool:
        """Give `state` pages for its next tokens, preempting the last in order; False when that is
        itself.
        """
        needed = self.pages.pages_for(state.num_computed + num_tokens)
        while len(state.pages) < needed:
            page = self.pages.allocate()
            if page is not None:
                state.pages.append(page)
                continue
            victim = max(self._running, key=lambda s: s.order)
            self._preempt(victim)
            rows.pop(victim.request.id, None)
            if victim is state:
                return False
        return True

    def _preempt(self, state: RequestState) -> None:
        self.num_preemptions += 1
        del self._running[state]
        self._release(state)
        state.drop_pending()  # drawn again, and the same, after the recompute
        state.prompt_logprobs.clear()
        heapq.heappush(self._waiting, (state.order, state))

    def _release(self, state: RequestState) -> None:
        self.pages.release(state.pages)
        state.pages = []
        state.num_computed = 0

    def _admit(self, rows: dict[str, ScheduledRow]) -> None:
        budget = self._budget_left(rows) if self._waiting else 0
        while self._waiting and len(self._running) < self.max_num_seqs:
            state = self._waiting[0][1]
            if budget == 0 or not self._take_pages(state):
                return
            heapq.heappop(self._waiting)
            self._running[state] = None
            num_tokens = min(state.num_uncomputed, budget)
            secured = self._secure_pages(state, num_tokens, rows)
            assert secured, "admission has checked that the whole request fits"
            rows[state.request.id] = ScheduledRow(state, num_tokens)
            budget -= num_tokens

    def _take_pages(self, state: RequestState) -> bool:
        """Share the known prefix and check that the rest of the tokens fits beside the running
        requests.
        """
        reads_cache = state.has_prompt_logprobs
        prefix = self.pages.take_prefix(state.token_ids) if reads_cache else []
        needed = self.pages.pages_for(len(state.token_ids)) - len(prefix)
        spare = len(self._running)  # a page for each running request to grow into
        if self._running and self.pages.num_free < needed + spare:
            self.pages.release(prefix)
            return False
        state.pages = prefix
        state.num_computed = len(prefix) * self.pages.page_size
        self._note_admission(state)
        return True

    def _note_admission(self, state: RequestState) -> None:
        if state.steps:  # it ran before and was preempted
            return
        waited = time.monotonic() - state.enqueued_s
        self.queue_time_s += 0.2 * (waited - self.queue_time_s)
        state.cached_tokens = min(state.num_computed, state.num_prompt)
        self.num_cached_tokens += state.cached_tokens

    def advance(self, row: ScheduledRow) -> None:
        """Record that a row's keys and values are being written."""
        row.start = row.state.num_computed
        row.state.num_computed += row.num_tokens

    def remember(self, row: ScheduledRow) -> None:
        """Make the pages that a row filled findable, once all tokens in them are known."""
        size, stop = self.pages.page_size, row.start + row.num_tokens
        if stop // size > row.start // size:
            self.pages.remember(row.state.token_ids, row.state.pages, stop)

    def drain(self, fail: Callable[[RequestState], None]) -> None:
        """End every request, telling `fail` of each."""
        for state in list(self._states.values()):
            self.finish(state)
            fail(state)

    def states(self) -> Iterable[RequestState]:
        """All requests, waiting or running."""
        return self._states.values()


def _decodes_first(state: RequestState) -> tuple[bool, tuple[int, int]]:
    return state.num_uncomputed > 1, state.order
