"""One streamed request to an OpenAI-compatible server, timed chunk by chunk."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from ..runtime.errors import PolypathError

DONE = b"[DONE]"
LINE_BYTES = 1 << 20  # of one event at most


class BenchError(PolypathError):
    """The server cannot be measured; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is asked, and how."""

    url: str  # without /v1
    model: str
    is_chat: bool = True
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    ignore_eos: bool = True  # not OpenAI's field, but the only way to fix an answer's length
    temperature: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)  # beyond the key's

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:  # JSON
        """The request for one answer."""
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.is_chat:
            return asked | {"messages": [{"role": "user", "content": prompt}]}
        return asked | {"prompt": prompt}


@dataclass(kw_only=True, slots=True)
class Sample:
    """One request as its client saw it. Times are seconds of the monotonic clock."""

    due_s: float  # when it was to be sent; what the generator was late counts as waiting
    chunk_s: list[float] = field(default_factory=list)  # arrivals of chunks that bear text
    end_s: float = 0.0
    prompt_tokens: int | None = None  # as the server counted; None: it told nothing
    new_tokens: int | None = None
    error: str | None = None  # its kind, such as http_429
    detail: str = ""  # of an error: the server's own words

    @property
    def first_token_s(self) -> float:
        return self.chunk_s[0] - self.due_s

    @property
    def whole_s(self) -> float:
        """To the last token."""
        return self.chunk_s[-1] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks that bear text, which are tokens where a server sends each by itself."""
        return [after - before for before, after in pairwise(self.chunk_s)]

    @property
    def num_tokens(self) -> int:
        """Generated: the server's count, or the chunks."""
        return self.new_tokens if self.new_tokens is not None else len(self.chunk_s)

    @property
    def per_token_s(self) -> float:
        """Mean time of each token after the first."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, self.num_tokens - 1)


def open_session(target: Target) -> aiohttp.ClientSession:
    """A session without limits of its own, and without proxies."""
    context = ssl.create_default_context() if target.url.startswith("https:") else False
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s, connect=10),
        headers={"Authorization": f"Bearer {target.key}"} if target.key else {},
        read_bufsize=LINE_BYTES,
    )


async def ask(
    session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int, due_s: float
) -> Sample:
    """One answer; what goes wrong is in the sample, by kind."""
    sample = Sample(due_s=due_s)
    try:
        async with session.post(
            target.url + target.path,
            json=target.body(prompt, max_tokens),
            headers=target.headers,
        ) as r:
            if r.status != 200:
                sample.error, sample.detail = f"http_{r.status}", _message(await r.read())
            else:
                await _read_stream(r, sample)
    except TimeoutError:
        sample.error = "timeout"
    except aiohttp.ClientConnectorError as error:
        sample.error, sample.detail = "cannot_connect", str(error)
    except (aiohttp.ClientError, ValueError) as error:  # ValueError: a line that is no event
        sample.error, sample.detail = "broken_stream", str(error) or type(error).__name__
    sample.end_s = time.monotonic()
    return sample


async def _read_stream(response: aiohttp.ClientResponse, sample: Sample) -> None:
    is_done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now_s, data = time.monotonic(), line[5:].strip()
        if data == DONE:
            is_done = True
            break
        event = json.loads(data)
        if "error" in event:
            sample.error, sample.detail = "stream_error", _message(data)
            return
        usage = event.get("usage")
        if usage:
            sample.prompt_tokens = usage.get("prompt_tokens")
            sample.new_tokens = usage.get("completion_tokens")
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            sample.chunk_s.append(now_s)
    if not is_done:
        sample.error = "broken_stream"
        sample.detail = "the stream ended without [DONE]"
    elif not sample.chunk_s:
        sample.error, sample.detail = "empty_answer", "the stream had no text"


def _has_text(choice: dict[str, Any]) -> bool:  # JSON
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")


async def find_model(url: str, key: str | None) -> str:
    """The first model that the server lists. Raises BenchError."""
    target = Target(url=url, model="", key=key)
    try:
        async with open_session(target) as session, session.get(f"{url}/v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise BenchError(f"{url}/v1/models answered {response.status}: {_message(body)}")
            return str(json.loads(body)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise BenchError(
            f"nothing usable answers at {url}: {error or type(error).__name__}"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url}/v1/models lists no model; name one with --model") from None
