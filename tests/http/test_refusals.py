"""Bad input is a 4xx with OpenAI's error body that names the field, and never reaches a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.runtime.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from polypath.tests.http.fakes import FakeLink, Serve, app_client, client_of, ids_of

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

BOTH = [  # extra fields, param, a piece of the message
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": "1"}, "temperature", "'1'"),
    ({"temperature": True}, "temperature", "True"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "between 0 and 1"),
    ({"presence_penalty": 2.1}, "presence_penalty", "2.1"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 129}, "n", "129"),
    ({"n": 33}, "n", "a worker holds 32"),
    ({"n": 1.5}, "n", "1.5"),
    ({"n": "2"}, "n", "'2'"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": "5"}, "max_tokens", "'5'"),
    ({"max_tokens": True}, "max_tokens", "True"),
    ({"max_tokens": 10**30}, "max_tokens", "at least 0"),
    ({"max_tokens": 100000}, "max_tokens", "512"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "max_tokens, 3"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"seed": 2**64}, "seed", "64-bit"),
    ({"seed": -(2**63) - 1}, "seed", "64-bit"),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"seed": "7"}, "seed", "'7'"),
    ({"seed": True}, "seed", "True"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": [""]}, "stop[0]", "empty"),
    ({"stop": ["a", ""]}, "stop[1]", "empty"),
    ({"stop": [str(n) for n in range(64)]}, "stop", "at most 16"),
    ({"stop": "x" * 513}, "stop", "at most 512"),
    ({"stop": 5}, "stop", "5"),
    ({"stop": [5]}, "stop[0]", "5"),
    ({"stop_token_ids": [260]}, "stop_token_ids[0]", "0 and 259"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "'a'"),
    ({"stop_token_ids": list(range(257))}, "stop_token_ids", "at most 256"),
    ({"logit_bias": {"260": 1}}, "logit_bias", "'259'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "'abc'"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias", "'1.5'"),
    ({"logit_bias": {" 5": 1}}, "logit_bias", "' 5'"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": None}}, "logit_bias", "None"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "'x'"),
    ({"logit_bias": {"5": True}}, "logit_bias", "True"),
    ({"logit_bias": [5]}, "logit_bias", "list"),
    ({"priority": 2**40}, "priority", "32-bit"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stream": 1}, "stream", "1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream_options": {"bananas": True}, "stream": True}, "stream_options.bananas", "no field"),
    ({"stream_options": 5}, "stream_options", "5"),
    ({"banana": 1}, "banana", "no field"),
    ({"Temperature": 1}, "Temperature", "no field"),
    ({"model": "gpt-9"}, "model", "gpt-9"),
    ({"model": 5}, "model", "5"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not built"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "not built",
    ),
    ({"guided_json": {}}, "guided_json", "not built"),
    ({"use_beam_search": True}, "use_beam_search", "beam"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "echo"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "never cut"),
    ({"bad_words": ["x"]}, "bad_words", "logit_bias"),
]
CHATS = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "required"),
    ({"messages": "hi"}, "messages", "'hi'"),
    ({"messages": ["hi"]}, "messages[0]", "a string"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "bot", "content": "hi"}]}, "messages[0].role", "developer"),
    ({"messages": [{"role": 5, "content": "hi"}]}, "messages[0].role", "5"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "an integer"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "no field"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
            ]
        },
        "messages[0].content[1]",
        "image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing",
    ),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "a string"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "512"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens", "send one"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"logprobs": 1}, "logprobs", "1"),
    ({"tools": [TOOL]}, "tools", "not built"),
    ({"tool_choice": "required"}, "tool_choice", "not built"),
    ({"tools": [], "tool_choice": {"type": "function"}}, "tool_choice", "not built"),
    ({"tool_choice": "sometimes"}, "tool_choice", "'sometimes'"),
    ({"functions": [{"name": "f"}]}, "functions", "not built"),
    ({"store": True}, "store", "stored"),
    ({"modalities": ["text", "audio"]}, "modalities", "text"),
    ({"audio": {}}, "audio", "text"),
    ({"continue_final_message": True}, "continue_final_message", "completions"),
    ({"chat_template": "x"}, "chat_template", "operator"),
    ({"prompt": "x"}, "prompt", "no field"),
]
TEXTS = [
    ({"prompt": ""}, "prompt", "no token"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": [""]}, "prompt[0]", "no token"),
    ({"prompt": ["a", ""]}, "prompt[1]", "no token"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt[0]", "no token"),
    ({"prompt": ["a", 5]}, "prompt[1]", "an integer"),
    ({"prompt": [5, "a"]}, "prompt[1]", "'a'"),
    ({"prompt": [[5], "a"]}, "prompt[1]", "a string"),
    ({"prompt": [5.5]}, "prompt[0]", "5.5"),
    ({"prompt": [True]}, "prompt[0]", "True"),
    ({"prompt": 5}, "prompt", "an integer"),
    ({"prompt": {"a": 1}}, "prompt", "an object"),
    ({"prompt": [260]}, "prompt[0]", "0 to 259"),
    ({"prompt": [5, -1]}, "prompt[1]", "-1"),
    ({"prompt": [[5], [5, 10**20]]}, "prompt[1][1]", "0 to 259"),
    ({"prompt": "x" * 513}, "prompt", "513"),
    ({"prompt": "x" * 512}, "prompt", "512"),
    ({"prompt": ["a", "x" * 513]}, "prompt[1]", "513"),
    ({"prompt": "x" * 100000}, "prompt", "100000"),
    ({"prompt": "x" * 511, "max_tokens": 2}, "max_tokens", "513"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "middle"),
    ({"prompt": "a", "best_of": 2}, "best_of", "must equal n"),
    ({"prompt": "a", "logprobs": 6}, "logprobs", "between 0 and 5"),
    ({"prompt": "a", "logprobs": -1}, "logprobs", "-1"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "True"),
    ({"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens", "no field"),
    ({"prompt": ["a"] * 33}, "prompt", "a worker holds 32"),
]


def _names(count: int) -> bytes:
    return b",".join(b'"f%d":1' % number for number in range(count))


def check_error(response: Any, status: int, param: str | None, piece: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert piece in error["message"]


@pytest.fixture(scope="module")
def strict(tiny: Checkpoint) -> Iterator[tuple[FastAPI, FakeLink]]:
    """One app for the whole table: nothing of it may reach the worker."""
    gateway, link = Gateway(), FakeLink()
    gateway.add_checkpoint(tiny, name="tiny")
    asyncio.run(gateway.add_worker(link))
    yield build_api(gateway), link
    gateway.close()


@pytest.mark.parametrize(
    ("path", "body", "param", "piece"),
    [("/v1/chat/completions", CHAT | extra, param, piece) for extra, param, piece in BOTH + CHATS]
    + [("/v1/completions", TEXT | extra, param, piece) for extra, param, piece in BOTH + TEXTS],
)
async def test_a_wrong_field_is_named(
    strict: tuple[FastAPI, FakeLink], path: str, body: dict[str, Any], param: str, piece: str
) -> None:
    app, link = strict
    async with app_client(app) as client:
        response = await client.post(path, json=body)
    check_error(response, 404 if param == "model" and piece == "gpt-9" else 400, param, piece)
    assert not link.requests


@pytest.mark.parametrize(
    ("raw", "piece"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "a list"),
        (b'"hi"', "a string"),
        (b"null", "null"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "\\ud800", "seed": 1e400}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}", "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests"),
    ],
)
async def test_what_is_no_json_object_is_a_400(serve: Serve, raw: bytes, piece: str) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=raw, headers=headers)
    check_error(response, 400, None, piece)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"logit_bias": {"5": 1e400}', "logit_bias"),
        (b'"temperature": 1e400', "temperature"),
        (b'"seed": -1e400', "seed"),
        (b'"prompt": [1e400]', "prompt[0]"),
        (b'"prompt": [[5, 1e30]]', "prompt[0][1]"),
    ],
)
async def test_a_number_beyond_a_double_is_refused_by_its_field(
    serve: Serve, field: bytes, param: str
) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        raw = b'{"prompt": "a", ' + field + b"}"
        response = await client.post("/v1/completions", content=raw)
    check_error(response, 400, param, param)


MILLION = 1_000_000


@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        ("/v1/completions", b'{"prompt": [' + b"5," * MILLION + b"5]}", "prompt"),
        ("/v1/completions", b'{"prompt": [' + b'"",' * MILLION + b'""]}', "prompt"),
        ("/v1/completions", b'{"prompt": "a", "stop": [' + b"5," * MILLION + b"5]}", "stop"),
        ("/v1/chat/completions", b'{"messages": [' + b"5," * MILLION + b"5]}", "messages[0]"),
        ("/detokenize", b'{"tokens": [' + b'"",' * MILLION + b'""]}', "tokens[0]"),
        ("/v1/completions", b'{"stream_options": {' + _names(300_000) + b"}}", "stream_options.f0"),
        ("/v1/completions", b"{" + _names(300_000) + b"}", "f0"),
    ],
    ids=["ids", "prompts", "stops", "messages", "tokens", "options", "fields"],
)
async def test_a_million_wrong_items_are_one_soon_refusal(
    serve: Serve, path: str, raw: bytes, param: str
) -> None:
    gateway = await serve(FakeLink(), settings=ApiSettings(max_body_bytes=2**23))
    start = time.monotonic()
    async with client_of(gateway) as client:
        response = await client.post(path, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert time.monotonic() - start < 2


async def test_another_content_type_is_a_415_that_says_what_to_send(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", data={"prompt": "hi"})
    check_error(response, 415, None, "Content-Type: application/json")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(serve: Serve, is_chunked: bool) -> None:
    gateway = await serve(FakeLink(), settings=ApiSettings(max_body_bytes=1000))
    raw = b'{"prompt": "' + b"x" * 1000 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 100):
            yield raw[start : start + 100]

    content = pieces() if is_chunked else raw
    async with client_of(gateway) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=content, headers=headers)
    check_error(response, 413, None, "1000 bytes")
    assert response.headers["connection"] == "close"


async def test_a_body_in_one_byte_pieces_is_as_good(serve: Serve) -> None:
    gateway = await serve(FakeLink("ok"))

    async def pieces() -> AsyncIterator[bytes]:
        for byte in b'{"prompt": "hi"}':
            yield bytes([byte])

    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", content=pieces())
    assert response.json()["choices"][0]["text"] == "ok"


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
