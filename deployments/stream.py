"""Answers on the wire: server-sent events or one body, ended at once when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from .answer import Piece
from .errors import as_api_error
from .json_body import JsonObject

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from .answer_format import AnswerFormat, AnswerHead
    from .generation import Generation

encode = msgspec.json.encode
COMMENT_S = 15.0  # between comments in a stream that waits
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class GenerationResponse(Response):
    """Runs a generation and sends it; an error before the first byte has its own status."""

    def __init__(
        self, generation: Generation, head: AnswerHead, form: AnswerFormat, *, is_stream: bool
    ) -> None:
        super().__init__()
        self._generation = generation
        self._head = head
        self._form = form
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._answer(scope, receive, send))
        finally:
            self._generation.leave_seat()  # a client that left before it began

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            if self._is_stream:
                await self._stream(scope, receive, send)
                return
            pieces: list[list[Piece]] = [[] for _ in self._generation.answers]
            async for batch in self._generation.batches():
                for piece in batch:
                    pieces[piece.index].append(piece)
        body = self._form.body(pieces)
        body["usage"] = self._head.usage()
        body["polypath"] = self._head.served()
        response = Response(encode(body), headers=self._headers(), media_type="application/json")
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generation.begin()
        start = Response(
            headers=self._headers() | SSE_HEADERS, media_type="text/event-stream; charset=utf-8"
        )
        headers = [(name, value) for name, value in start.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._keep_open(send)
            await self._send_events(send)
        except (
            Exception
        ) as error:  # the edge of a request: as_api_error logs what is a fault of ours
            body = as_api_error(error).body()
            await _send(send, b"event: error\ndata: " + encode(body) + b"\n\n")
        await _send(send, b"", more=False)

    async def _keep_open(self, send: Send) -> None:
        """A comment now and then while the stream still waits in the queue: proxies and clients
        take a silent one for dead.
        """
        while self._generation.worker is None and not await self._generation.has_news(COMMENT_S):
            await _send(send, b": waiting for a worker\n\n")

    async def _send_events(self, send: Send) -> None:
        """One message per batch of pieces; `polypath` goes out with the very last chunk."""
        async for batch in self._generation.batches():
            chunks = [chunk for piece in batch for chunk in self._form.chunks(piece)]
            is_over = all(answer.finish_reason for answer in self._generation.answers)
            if is_over:
                chunks += self._last_chunks(chunks)
            if chunks:
                done = b"data: [DONE]\n\n" if is_over else b""
                await _send(send, b"".join(map(event, chunks)) + done)

    def _last_chunks(self, chunks: list[JsonObject]) -> list[JsonObject]:
        """Mark the last chunk as such; with include_usage that is one more, without choices."""
        if not self._head.include_usage:
            chunks[-1]["polypath"] = self._head.served()
            return []
        usage = self._head.fields(str(chunks[-1]["object"]), [])
        usage["usage"] = self._head.usage()
        usage["polypath"] = self._head.served()
        return [usage]

    def _headers(self) -> dict[str, str]:
        return self._generation.route_headers()


def event(chunk: JsonObject) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + encode(chunk) + b"\n\n"


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the client leaves; then it is cancelled and awaited."""
    running = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        running.cancel()
        leaving.cancel()
        await asyncio.gather(running, leaving, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
