"""From a request's fields to `SamplingParams`, with the checks that need the model's facts."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.errors import ContextLengthError, RequestError
from ..runtime.request import SamplingParams
from .api_settings import ApiSettings
from .schema import GenerationBody, found_value
from .schema_chat import ChatBody
from .schema_completion import CompletionBody

TOKEN_ID = re.compile(r"[0-9]{1,10}")
SEED_BITS = 53  # of a seed we choose: exact in every JSON reader


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRules:
    """How every answer of one API request is made and cut."""

    sampling: SamplingParams  # of prompt 0, choice 0
    num_choices: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    continues: bool  # the text goes on from the prompt's: completions
    is_seeded: bool  # by the client: then all prompts of a list share the seed

    def of(self, prompt_number: int, choice: int) -> SamplingParams:
        """Parameters of one answer. Without a client's seed, each prompt of a list gets its own."""
        shift = 0 if self.is_seeded else prompt_number
        return replace(self.sampling, seed=self.sampling.seed + shift, choice=choice)


def answer_rules(body: GenerationBody, vocab_size: int, settings: ApiSettings) -> AnswerRules:
    """Check `body` and say how to answer it. Raises `RequestError` that names the field."""
    _require(
        1 <= body.n <= settings.max_choices, "n", body.n, f"between 1 and {settings.max_choices}"
    )
    _check_stream_options(body)
    logprobs, prompt_logprobs = _logprobs(body, settings)
    max_tokens = _max_tokens(body)
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {body.min_tokens}; it must not exceed max_tokens, {max_tokens}",
            "min_tokens",
        )
    sampling = SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0) if body.top_k >= -1 else body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, vocab_size, settings.max_logit_bias),
        seed=_seed(body.seed),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=_stop_token_ids(body.stop_token_ids, vocab_size, settings),
    )
    _require(abs(body.priority) < 2**31, "priority", body.priority, "a 32-bit integer")
    return AnswerRules(
        sampling=sampling,
        num_choices=body.n,
        stop=_stop_strings(body.stop, settings),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        continues=isinstance(body, CompletionBody),
        is_seeded=body.seed is not None,
    )


def check_prompt_len(prompt_len: int, max_model_len: int, param: str) -> None:
    """Raise `ContextLengthError`, with both numbers, for a prompt beyond the context."""
    if prompt_len > max_model_len:
        raise ContextLengthError(
            f"{param} has {prompt_len} tokens; the context holds {max_model_len}. Shorten it.",
            param,
        )


def check_context(prompt_len: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Raise `ContextLengthError`, with the numbers, when prompt and answer cannot fit."""
    check_prompt_len(prompt_len, max_model_len, param)
    if max_tokens is None and prompt_len == max_model_len:
        raise ContextLengthError(
            f"{param} has {prompt_len} tokens and fills the context of {max_model_len}; "
            "no token can be generated. Shorten it, or ask for max_tokens 0.",
            param,
        )
    if max_tokens is not None and prompt_len + max_tokens > max_model_len:
        raise ContextLengthError(
            f"{param} has {prompt_len} tokens and max_tokens is {max_tokens}, together "
            f"{prompt_len + max_tokens}; the context holds {max_model_len}. "
            f"Ask for at most {max_model_len - prompt_len} tokens, or leave max_tokens out.",
            "max_tokens" if prompt_len < max_model_len else param,
        )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}; it must be {allowed}", name)


def _check_stream_options(body: GenerationBody) -> None:
    options = body.stream_options
    if options is None:
        return
    if options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation is not supported; leave it out or send false",
            "stream_options.include_obfuscation",
        )
    if not body.stream and (options.include_usage or options.continuous_usage_stats):
        raise RequestError("stream_options needs stream to be true", "stream_options")


def _max_tokens(body: GenerationBody) -> int | None:
    value, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if value is not None and value != body.max_completion_tokens:
            raise RequestError(
                f"max_tokens is {value} and max_completion_tokens is {body.max_completion_tokens}; "
                "send one of them",
                "max_completion_tokens",
            )
        value, name = body.max_completion_tokens, "max_completion_tokens"
    if value is not None:
        _require(0 <= value < 2**31, name, value, f"between 0 and {2**31 - 1}")
    return value


def _logprobs(body: GenerationBody, settings: ApiSettings) -> tuple[int | None, int | None]:
    """Log-probabilities asked for of (answer, prompt): None, or how many rivals of each token."""
    if isinstance(body, CompletionBody):
        count, limit = body.logprobs, settings.max_completion_logprobs
        if count is not None:
            _require(0 <= count <= limit, "logprobs", count, f"between 0 and {limit}")
        return count, count if body.echo else None
    assert isinstance(body, ChatBody), "a request is a chat or a completion"
    if body.top_logprobs is None:
        return (0 if body.logprobs else None), None
    limit = settings.max_chat_logprobs
    _require(
        0 <= body.top_logprobs <= limit, "top_logprobs", body.top_logprobs, f"between 0 and {limit}"
    )
    if not body.logprobs:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}; it needs logprobs to be true", "top_logprobs"
        )
    return body.top_logprobs, None


def _logit_bias(bias: dict[str, object], vocab_size: int, limit: int) -> dict[int, float]:
    if len(bias) > limit:
        raise RequestError(
            f"logit_bias has {len(bias)} entries; at most {limit} are allowed", "logit_bias"
        )
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if TOKEN_ID.fullmatch(key) else -1
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias has the key {found_value(key)}; a key is a token id, "
                f"'0' to '{vocab_size - 1}'",
                "logit_bias",
            )
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not -100 <= value <= 100
        ):
            raise RequestError(
                f"logit_bias of token {token_id} is {found_value(value)}; "
                "it must be a number between -100 and 100",
                "logit_bias",
            )
        checked[token_id] = float(value)
    return checked


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(SEED_BITS)
    _require(-(2**63) <= seed < 2**64, "seed", seed, "a 64-bit integer, signed or unsigned")
    return seed


def _stop_strings(stop: str | list[Any] | None, settings: ApiSettings) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > settings.max_stop_strings:
        raise RequestError(
            f"stop has {len(strings)} strings; at most {settings.max_stop_strings} are allowed",
            "stop",
        )
    for number, text in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{number}]"
        if not isinstance(text, str):
            raise RequestError(f"{param} is {found_value(text)}; it must be a string", param)
        if not text:
            raise RequestError(f"{param} is empty; it would end every answer at once", param)
        if len(text) > settings.max_stop_chars:
            raise RequestError(
                f"{param} has {len(text)} characters; "
                f"at most {settings.max_stop_chars} are allowed",
                param,
            )
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(ids: list[int], vocab_size: int, settings: ApiSettings) -> tuple[int, ...]:
    if len(ids) > settings.max_stop_token_ids:
        raise RequestError(
            f"stop_token_ids has {len(ids)} ids; at most {settings.max_stop_token_ids} are allowed",
            "stop_token_ids",
        )
    for number, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids[{number}] is {token_id}; "
                f"it must be between 0 and {vocab_size - 1}",
                f"stop_token_ids[{number}]",
            )
    return tuple(dict.fromkeys(ids))
