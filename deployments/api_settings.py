"""Limits of the HTTP API that an operator may turn; the defaults suit one machine on loopback."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiSettings:
    """What the API accepts at most, and to whom it answers. docs/api.md explains each."""

    max_body_bytes: int = (
        4 * 1024 * 1024
    )  # larger request bodies are answered 413 before they are read
    max_choices: int = 128  # n
    max_stop_strings: int = 16
    max_stop_chars: int = 512  # of one stop string
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024  # entries
    max_chat_logprobs: int = 20  # top_logprobs of a chat
    max_completion_logprobs: int = 5  # logprobs of a completion
    cors_origins: tuple[str, ...] = ()  # empty: no cross-origin headers at all; "*" for any
    headers_after_s: float = 0.5  # a stream whose first token takes longer sends its headers then
    cancel_grace_s: float = (
        0.5  # wait this long for the step counts of an answer that a stop string ended
    )
    stats_timeout_s: float = 5.0  # for one worker's answer to /health, /metrics and /v1/paths
    compares_policies: bool = False  # `polypath bench routing` may ask for another policy by header
    refresh_s: float = 5.0  # how often workers are asked for the speeds of their live steps
    heartbeat_limit_s: float = 60.0  # a step loop with work that is silent for longer is unhealthy
    tokenizer_threads: int = 2
    max_queued: int | None = None  # answers of one model that wait here; None: all workers' queues
    queue_headers_after_s: float = 15.0  # a stream still in the queue sends its headers then
    max_resumes: int = 3  # workers that may fail one answer before it is given up
    max_refusals: int = 4  # full workers that may refuse one answer before that is a 429
    stranded_s: float = 30.0  # an answer that no worker can take on waits so long for one to come
    same_class_s: float = 2.0  # a resumed answer waits so long for room on a worker of its class
    goal_s: float | None = None  # of requests that name none: seconds to the last token
    silence_s: float = 2.0  # a worker that sends nothing for so long is asked whether it lives

    def __post_init__(self) -> None:
        for setting in fields(self):
            found = getattr(self, setting.name)
            is_number = isinstance(found, int | float)
            if is_number and not (math.isfinite(found) and found >= 0):
                raise ConfigurationError(f"{setting.name} is {found:g}; it must be 0 or more")
        for name in ("stats_timeout_s", "refresh_s", "heartbeat_limit_s", "silence_s"):
            if getattr(self, name) == 0:
                raise ConfigurationError(f"{name} is 0; it must be above 0")
        least_one = ("max_body_bytes", "max_choices", "max_stop_strings", "tokenizer_threads")
        for name in (*least_one, *(() if self.max_queued is None else ("max_queued",))):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.goal_s is not None and self.goal_s <= 0:
            raise ConfigurationError(f"goal_s is {self.goal_s}; it must be above 0")
