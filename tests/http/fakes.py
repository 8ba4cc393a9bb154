"""A worker that says what it is told, and a client that can leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
from fastapi import FastAPI

from polypath.actors.load import WorkerLoad
from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.runtime.errors import EngineError, QueueFullError
from polypath.runtime.request import (
    FinishReason,
    Request,
    RequestOutput,
    StepCount,
    TokenLogprob,
)

END = 1  # `</s>` of the tiny tokenizer, whose byte b is id 4 + b
LOAD = WorkerLoad(
    running=0,
    waiting=0,
    queued_tokens=0,
    kv_pages_free=1000,
    prefill_tokens_s=0.0,
    decode_tokens_s=0.0,
    step_s=0.0,
    sent_s=0.0,
)
STEPS = (StepCount(mode="decode", runner="eager", reason="planned", steps=3),)


Serve = Callable[..., Awaitable[Gateway]]  # the fixture `serve`


def client_of(gateway: Gateway) -> httpx.AsyncClient:
    """A client of the whole API, in process; answers arrive when they are whole."""
    return app_client(build_api(gateway))


def app_client(app: FastAPI) -> httpx.AsyncClient:
    """The same for an app that several tests share."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://polypath")


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def check_error(response: httpx.Response, status: int, param: str | None, piece: str) -> None:
    """The refusal has OpenAI's shape, names the field, and says what was found or is allowed."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert piece in error["message"]


def ids_of(text: str) -> list[int]:
    """Ids of the tiny byte tokenizer."""
    return [4 + byte for byte in text.encode()]


class FakeLink:
    """Speaks `says` a token a step, then ends. Every request it saw, and every cancel, is kept."""

    kind = "local"

    def __init__(
        self,
        says: str | list[int] = "hello",
        *,
        worker_id: str = "worker-fake",
        model: str = "tiny",
        max_model_len: int = 512,
        tokens_a_step: int = 1,
        step_s: float = 0.0,
        first_step_s: float = 0.0,
        max_num_seqs: int = 16,
        max_waiting: int = 16,
    ) -> None:
        self.says = ids_of(says) if isinstance(says, str) else says
        self.worker_id = worker_id
        self.model = model
        self.max_model_len = max_model_len
        self.tokens_a_step = tokens_a_step
        self.step_s = step_s
        self.first_step_s = first_step_s
        self.max_num_seqs = max_num_seqs
        self.max_waiting = max_waiting
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.fails_after: int | None = None  # tokens, then an EngineError
        self.raises: Exception | None = None  # instead of the first output
        self.stats_answer: dict[str, Any] | None = None
        self.load_answer: WorkerLoad | None = None
        self.is_dead = False

    async def describe(self) -> dict[str, Any]:
        return {
            "worker_id": self.worker_id,
            "model": self.model,
            "model_path": "/nowhere",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_waiting": self.max_waiting,
            "vocab_size": 260,
            "fingerprint": "pp-0123456789ab",
            "path": {"prefill": "eager+torch_sdpa+torch", "decode": "eager+torch_sdpa+torch"},
            "plan": {"device": "cpu"},
            "hardware": {"kind": "cpu"},
            "pid": 1,
            "started_at": 0.0,
        }

    async def stats(self) -> dict[str, Any]:
        if self.is_dead:
            raise EngineError("the worker could not be reached")
        return self.stats_answer or {
            "worker_id": self.worker_id,
            "running": len(self.running),
            "waiting": 0,
            "kv_pages_total": 100,
            "kv_pages_used": len(self.running),
            "prompt_tokens_total": 7,
            "generation_tokens_total": 11,
            "requests_total": {"stop": 2, "length": 1},
            "preemptions_total": 0,
            "prefix_cached_tokens_total": 3,
            "steps": [{"mode": "decode", "runner": "eager", "reason": "planned", "count": 5}],
            "step_seconds_total": 0.5,
            "heartbeat_age_s": 0.1,
            "queue_time_s": 0.0,
            "step_failures_total": 0,
        }

    def load(self) -> WorkerLoad | None:
        return self.load_answer

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def hold(self, is_held: bool) -> None:
        if self.is_dead:
            raise EngineError("the worker could not be reached")
        self.load_answer = LOAD if not is_held else replace(LOAD, is_held=True)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        if self.raises is not None:
            raise self.raises
        if len(self.running) >= self.max_num_seqs + self.max_waiting:
            raise QueueFullError("the queue is full; try again", 1.5)
        self.running.add(request.id)
        finished = False
        try:
            async for output in self._outputs(request):
                finished = output.finish_reason is not None
                yield output
        finally:
            self.running.discard(request.id)
            if not finished:
                self.cancelled.append(request.id)

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        script, reason = self._script(request)
        await asyncio.sleep(self.first_step_s)
        position = 0
        while True:
            if request.id in self.cancelled:
                yield self._output(request, position, [], FinishReason.CANCELLED)
                return
            if self.fails_after is not None and position >= self.fails_after:
                raise EngineError("the engine has stopped")
            ids = script[position : position + self.tokens_a_step]
            is_last = position + len(ids) >= len(script)
            yield self._output(request, position, ids, reason if is_last else None)
            if is_last:
                return
            position += len(ids)
            await asyncio.sleep(self.step_s)

    def _script(self, request: Request) -> tuple[list[int], FinishReason]:
        sampling = request.sampling
        limit = self.max_model_len - len(request.prompt_ids)
        limit = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
        script = [*self.says, END]
        for position, token_id in enumerate(script[:limit]):
            ends = token_id in sampling.stop_token_ids
            ends = ends or (token_id == END and not sampling.ignore_eos)
            if ends and position >= sampling.min_tokens:
                return script[: position + 1], FinishReason.STOP
        return (script * (limit // len(script) + 1))[:limit], FinishReason.LENGTH

    def _output(
        self, request: Request, position: int, ids: list[int], reason: FinishReason | None
    ) -> RequestOutput:
        sampling = request.sampling
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple(_logprob(token_id, sampling.logprobs) for token_id in ids)
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if sampling.prompt_logprobs is not None and position == 0:
            rest = (
                _logprob(token_id, sampling.prompt_logprobs) for token_id in request.prompt_ids[1:]
            )
            prompt_logprobs = (None, *rest)
        return RequestOutput(
            request_id=request.id,
            position=position,
            token_ids=tuple(ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            cached_tokens=2,
            steps=STEPS if reason is not None else (),
        )


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    """Made up, but the same for the same token: the likeliest is the token itself."""
    top = tuple(((token_id + n) % 260, -0.5 - n) for n in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=top)


class Call:
    """One request straight into the ASGI app, chunk by chunk, whose client may go away."""

    def __init__(
        self,
        app: FastAPI,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | dict(headers or {})
        self._body = [raw]
        self._gone = asyncio.Event()
        self.messages: list[Any] = []  # ASGI messages
        self._arrived = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        self._arrived.set()

    async def until(self, num_messages: int) -> None:
        """Wait for that many ASGI messages; the first is the response's start."""
        async with asyncio.timeout(5):
            while len(self.messages) < num_messages:
                self._arrived.clear()
                await self._arrived.wait()

    def hang_up(self) -> None:
        """The client closes its connection."""
        self._gone.set()

    async def leave(self) -> None:
        """The same; returns when the app is done with it."""
        self.hang_up()
        async with asyncio.timeout(5):
            await self.task

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.messages).decode()
