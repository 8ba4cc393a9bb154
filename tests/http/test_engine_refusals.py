"""What the engine or the context refuses has its own status; our own faults tell nothing."""

from __future__ import annotations

import pytest

from polypath.runtime.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from polypath.tests.http.fakes import FakeLink, Serve, check_error, client_of, ids_of

pytestmark = pytest.mark.anyio

TEXT = {"prompt": "hi"}


async def test_a_full_queue_is_a_429_with_whole_seconds_to_wait(serve: Serve) -> None:
    link = FakeLink()
    link.raises = QueueFullError("32 requests wait", 1.2)
    gateway = await serve(link)
    for stream in (False, True):
        async with client_of(gateway) as client:
            response = await client.post("/v1/completions", json=TEXT | {"stream": stream, "n": 2})
        check_error(response, 429, None, "32 requests wait")
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["code"] == "queue_full"
    assert all(worker.num_in_flight == 0 for worker in gateway.all_workers())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no such thing", "prompt"), 400, None),
        (ContextLengthError("too long", "prompt"), 400, "context_length_exceeded"),
        (EngineError("the worker could not be reached"), 503, "engine_error"),
    ],
)
async def test_what_the_engine_refuses_has_its_status(
    serve: Serve, error: Exception, status: int, code: str | None
) -> None:
    link = FakeLink()
    link.raises = error
    gateway = await serve(link)
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json=TEXT | {"stream": True})
    check_error(response, status, "prompt" if status == 400 else None, str(error))
    assert response.json()["error"]["code"] == code


async def test_too_long_says_so_by_code(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"prompt": ids_of("x" * 600)})
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_generated"),
    [(511, None, 1), (511, 1, 1), (510, 2, 2), (512, 0, 0), (510, None, 2)],
)
async def test_the_context_can_be_used_to_its_last_token(
    serve: Serve, length: int, max_tokens: int | None, num_generated: int
) -> None:
    gateway = await serve(FakeLink("hello"))
    async with client_of(gateway) as client:
        body = {"prompt": "x" * length, "max_tokens": max_tokens}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == num_generated
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_without_a_worker_it_is_a_503(serve: Serve) -> None:
    gateway = await serve()
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json=TEXT)
    check_error(response, 503, None, "No worker serves tiny")
    assert "retry-after" in response.headers


async def test_a_fault_of_ours_is_a_500_without_internals_and_a_traceback_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    link = FakeLink()
    link.raises = ValueError("secret words of a prompt")
    gateway = await serve(link)
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json=TEXT)
    check_error(response, 500, None, "The server failed")
    assert "secret" not in response.text
    assert "ValueError" in caplog.text
    assert "in generate" in caplog.text
    assert "secret" not in caplog.text
