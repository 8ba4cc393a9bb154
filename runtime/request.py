"""What goes into an engine (`Request`) and what comes out of it (`RequestOutput`); plain data that
any link can carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite

from .errors import RequestError


class FinishReason(StrEnum):
    """Why a request ended. `stop`: an end token or stop token id; stop strings are matched by the
    detokenizer's owner. `moved`: its worker drains, and another one is to take it up from here.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    MOVED = "moved"


INTEGERS = ("top_k", "seed", "choice", "min_tokens")  # of SamplingParams; never None
OPTIONAL_INTEGERS = ("logprobs", "prompt_logprobs", "max_tokens")
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    Presence and frequency penalties count generated tokens only; the repetition penalty counts
    prompt and generated
    tokens (vLLM's and OpenAI's rule). The draw at a position depends on nothing but (seed, choice,
    position) and the logits.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # taken modulo 2**64
    choice: int = 0  # which of n answers this is
    logprobs: int | None = None  # None: none; k: the chosen token and the k likeliest
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    max_tokens: int | None = None  # None: as many as the context holds; 0: prompt only
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            (
                "repetition_penalty",
                0.0 < self.repetition_penalty <= 100.0,
                "above 0 and at most 100",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "at least 0"),
            ("logit_bias", all(map(isfinite, self.logit_bias.values())), "finite for every token"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be {allowed}", name)

    def _check_types(self) -> None:
        """Raise RequestError for a value that a step would choke on, which is too late."""
        for name in (*INTEGERS, *OPTIONAL_INTEGERS):
            value = getattr(self, name)
            if not _is_integer(value) and not (value is None and name in OPTIONAL_INTEGERS):
                raise RequestError(f"{name} is {value!r}; it must be a whole number", name)
        for name in FLOATS:
            if not _is_number(value := getattr(self, name)):
                raise RequestError(f"{name} is {value!r}; it must be a number", name)
        for value in self.stop_token_ids:
            if not _is_integer(value):
                raise RequestError(
                    f"stop_token_ids holds {value!r}; a token id is a whole number",
                    "stop_token_ids",
                )
        for token_id, bias in self.logit_bias.items():
            if not (_is_integer(token_id) and _is_number(bias)):
                raise RequestError(
                    f"logit_bias holds {token_id!r}: {bias!r}; it must map token ids, which are "
                    "whole numbers, to numbers",
                    "logit_bias",
                )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answer to generate. A request whose `output_ids` is not empty resumes: limits and
    penalties count from its start.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    output_ids: tuple[int, ...] = ()  # generated before, here or on another worker
    priority: int = 0  # smaller runs earlier


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, of the distribution before temperature and filters) of one token
    and its likeliest rivals.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCount:
    """How many forward passes of a request ran in this mode, on this runner, for this reason
    (`planned` when on plan).
    """

    mode: str
    runner: str
    reason: str
    steps: int


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """What one engine step gave one request; the last one has a `finish_reason`.

    Not frozen, but nobody changes one: each token of each request makes one, and a frozen one takes
    three times as long to make.
    """

    request_id: str
    position: int  # index in output_ids of the first of `token_ids`
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token id, empty unless asked
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = (
        None  # once, with the first output; None for the first token
    )
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    steps: tuple[StepCount, ...] = ()  # with the last output
    error: str | None = None  # with finish_reason `error`
