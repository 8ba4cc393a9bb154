"""Answering a batch of prompts in process: `Engine.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from .detokenizer import IncrementalDetokenizer
from .engine import Engine
from .errors import EngineError, RequestError
from .request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob

Prompt = str | Sequence[int]
_numbers = count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One answer. `token_ids` include an end token where one ended it; `text` does not."""

    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class _Answer:
    """A completion under way."""

    request: Request
    detokenizer: IncrementalDetokenizer
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    stop: Sequence[str] = (),
) -> list[Completion]:
    """Answer all prompts, as many at once as the plan allows.

    Raises RequestError for a prompt that cannot run (then none has), EngineError when a step fails.
    """
    if isinstance(prompts, str):
        raise RequestError("prompts is one string; give a list of prompts", "prompts")
    answers = _answers(engine, prompts, params, stop)
    pending = list(reversed(answers.values()))
    try:
        while any(a.finish_reason is None for a in answers.values()):
            _submit(engine, pending)
            for output in engine.step():
                if (answer := answers.get(output.request_id)) is not None:
                    _take(engine, answer, output)
    finally:  # what a stop string or an error left running must not go on
        for request_id in answers:
            engine.cancel(request_id)
        while any(engine.knows(request_id) for request_id in answers):
            engine.step()
    return [_completion(a) for a in answers.values()]


def _answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    stop: Sequence[str],
) -> dict[str, _Answer]:
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    answers: dict[str, _Answer] = {}
    for prompt, sampling in zip(prompts, params, strict=True):
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = Request(id=f"offline-{next(_numbers)}", prompt_ids=tuple(ids), sampling=sampling)
        engine.check(request)
        answers[request.id] = _Answer(request, IncrementalDetokenizer(engine.tokenizer, stop=stop))
    return answers


def _submit(engine: Engine, pending: list[_Answer]) -> None:
    while pending and engine.has_room():
        engine.submit(pending.pop().request)


def _take(engine: Engine, answer: _Answer, output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise EngineError(output.error or "the engine failed")
    if answer.finish_reason is not None:  # a stop string has ended it
        return
    answer.token_ids.extend(output.token_ids)
    answer.logprobs.extend(output.logprobs)
    answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
    answer.cached_tokens = output.cached_tokens
    ends = output.finish_reason is FinishReason.STOP
    delta = answer.detokenizer.push(output.token_ids[:-1] if ends else output.token_ids)
    answer.text += delta.text
    if delta.stopped_by is not None:
        answer.finish_reason = FinishReason.STOP
        engine.cancel(output.request_id)
        return
    if output.finish_reason is not None:
        last = answer.detokenizer.finish()
        answer.text += last.text
        stopped = last.stopped_by is not None
        answer.finish_reason = FinishReason.STOP if stopped else output.finish_reason


def _completion(answer: _Answer) -> Completion:
    assert answer.finish_reason is not None, "every answer has ended"
    return Completion(
        prompt_ids=answer.request.prompt_ids,
        text=answer.text,
        token_ids=tuple(answer.token_ids),
        finish_reason=answer.finish_reason,
        logprobs=tuple(answer.logprobs),
        prompt_logprobs=answer.prompt_logprobs,
        cached_tokens=answer.cached_tokens,
    )
