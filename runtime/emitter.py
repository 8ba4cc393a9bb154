"""From what a step gave each of its rows to the outputs of their requests; lets go of those that
end.
"""

from __future__ import annotations

from .counters import Counters
from .inbox import Inbox
from .kv.pages import Pages
from .launched_step import Drawn
from .logprobs import RowLogprobs
from .request import FinishReason, RequestOutput, StepCount, TokenLogprob
from .sampler import NoToken
from .scheduler import RequestState, ScheduledRow, Scheduler


class Emitter:
    """Knows when an answer ends, and who must hear of it."""

    def __init__(
        self,
        scheduler: Scheduler,
        pages: Pages,
        counters: Counters,
        inbox: Inbox,
        *,
        stop_ids: frozenset[int],
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._counters = counters
        self._inbox = inbox
        self._stop_ids = stop_ids

    def score_prompt(self, row: ScheduledRow, numbers: RowLogprobs) -> None:
        """Collect prompt log-probabilities, unless they will be computed again."""
        if self._scheduler.runs(row.state):
            if not row.state.prompt_logprobs:
                row.state.prompt_logprobs.append(None)
            row.state.prompt_logprobs.extend(numbers.to_host())

    def emit(self, row: ScheduledRow, drawn: list[Drawn]) -> RequestOutput | None:
        """What its row gave one request; None while its prompt is not yet complete."""
        state = row.state
        self._scheduler.remember(row)
        if row.draw < 0:
            if row.start + row.num_tokens < state.num_known:
                return None
            self._scheduler.finish(state)  # its answer was complete before
            return self.ended(state, FinishReason.LENGTH)
        token = drawn[row.draw]
        if isinstance(token, NoToken):
            self._scheduler.finish(state)
            if token is NoToken.NOT_FINITE:  # keys and values of others may be damaged too
                self._pages.forget_all()
            return self.ended(state, FinishReason.ERROR, f"no token can be drawn: {token.value}")
        state.resolve(token[0])
        self._counters.generation_tokens += 1
        reason = self._finish_reason(state, token[0])
        if reason is None:
            return self._output(state, token)
        self._scheduler.finish(state)
        return self.ended(state, reason, token=token)

    def _finish_reason(self, state: RequestState, token: int) -> FinishReason | None:
        params = state.sampling
        is_end = (
            token in self._stop_ids and not params.ignore_eos
        ) or token in params.stop_token_ids
        num_outputs = state.num_known_outputs
        if is_end and num_outputs > params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_outputs >= state.max_outputs else None

    def _output(
        self,
        state: RequestState,
        token: tuple[int, TokenLogprob | None] | None = None,
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        prompt_logprobs = None
        if not state.has_prompt_logprobs and reason not in (
            FinishReason.CANCELLED,
            FinishReason.ERROR,
        ):
            state.has_prompt_logprobs = True
            prompt_logprobs = tuple(state.prompt_logprobs or [None])
            state.prompt_logprobs = []
        ids = () if token is None else (token[0],)
        steps = () if reason is None else _step_counts(state)
        return RequestOutput(
            request_id=state.request.id,
            position=state.num_known_outputs - len(ids),
            token_ids=ids,
            logprobs=() if token is None or token[1] is None else (token[1],),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            cached_tokens=state.cached_tokens,
            steps=steps,
            error=error,
        )

    def ended(
        self,
        state: RequestState,
        reason: FinishReason,
        error: str | None = None,
        token: tuple[int, TokenLogprob | None] | None = None,
    ) -> RequestOutput:
        """The last output of a request that the scheduler has let go."""
        self._inbox.forget(state.request.id)
        self._counters.requests[reason.value] += 1
        self._counters.prompt_tokens += state.num_prompt
        return self._output(state, token, reason, error)


def _step_counts(state: RequestState) -> tuple[StepCount, ...]:
    return tuple(
        StepCount(mode=mode, runner=runner, reason=reason, steps=n)
        for (mode, runner, reason), n in sorted(state.steps.items())
    )
