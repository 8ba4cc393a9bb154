"""Limits as OpenAI tells them: x-ratelimit-* headers, and the body of a 429."""

from __future__ import annotations

import math

from .errors import ApiError, retry_after
from .ledger import Excess, KeyLimits, Measure, Standing

NOUNS = {
    Measure.REQUESTS: "requests per min (RPM)",
    Measure.TOKENS: "tokens per min (TPM)",
    Measure.CONCURRENCY: "requests at once",
}

RATE_HEADERS = tuple(
    f"x-ratelimit-{part}-{name}"
    for name in ("requests", "tokens")
    for part in ("limit", "remaining", "reset")
)


def rate_headers(limits: KeyLimits, standing: Standing) -> dict[str, str]:
    """OpenAI's six headers, those of a limit that the key has."""
    headers: dict[str, str] = {}
    rows = (
        ("requests", limits.requests_per_minute, standing.requests, standing.reset_requests_s),
        ("tokens", limits.tokens_per_minute, standing.tokens, standing.reset_tokens_s),
    )
    for name, limit, used, reset_s in rows:
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - used))
            headers[f"x-ratelimit-reset-{name}"] = duration(reset_s)
    return headers


def too_many(key: str, excess: Excess) -> ApiError:
    """The refusal of a request that is beyond one of the key's limits."""
    start = f"Rate limit reached for the key {key!r} on {NOUNS[excess.measure]}: "
    numbers = f"Limit {excess.limit}, Used {excess.used}, Requested {excess.asked}."
    advice = f"Please try again in {duration(excess.wait_s)}."
    headers = retry_after(excess.wait_s)
    if excess.asked > excess.limit:
        start = f"Request too large for the key {key!r} on {NOUNS[excess.measure]}: "
        advice = "Prompt and max_tokens together must be within the limit."
        headers = {}
    return ApiError(
        429,
        f"{start}{numbers} {advice}",
        code="rate_limit_exceeded",
        headers=headers,
        kind=excess.measure.value,
    )


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: `20ms`, `1.5s`, `1m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
