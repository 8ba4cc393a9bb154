"""Stop strings: matched over token borders, never in the prompt, told to the engine at once."""

from __future__ import annotations

from typing import Any

import pytest

from polypath.tests.http.fakes import FakeLink, Serve, client_of, events

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_a_step", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("lo", "hel"),
        (["zz", "ell"], "h"),
        ("h", ""),
        (" ", "hello"),
        (["o w", "o wo"], "hell"),
        ("nowhere", "hello world"),
        (["ello", "ello"], "h"),
    ],
)
async def test_the_text_ends_before_the_stop_string(
    serve: Serve, stop: Any, text: str, tokens_a_step: int, stream: bool
) -> None:
    link = FakeLink("hello world", tokens_a_step=tokens_a_step)
    gateway = await serve(link)
    body = {"prompt": "x", "stop": stop, "stream": stream, "logprobs": 0}
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json=body)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response.text)]
        got = "".join(choice["text"] for choice in choices)
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        reason = choices[-1]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        got, tokens, reason = choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]
    assert (got, reason) == (text, "stop")
    assert "".join(tokens).removesuffix("</s>") == text
    assert not link.running


async def test_the_engine_hears_of_it_and_its_step_counts_still_come(serve: Serve) -> None:
    link = FakeLink("hello world", step_s=0.01)
    gateway = await serve(link)
    async with client_of(gateway) as client:
        answer = (await client.post("/v1/completions", json={"prompt": "x", "stop": "ll"})).json()
    assert link.cancelled == [link.requests[0].id]
    assert answer["polypath"]["steps"][0]["steps"] == 3
    assert answer["usage"]["completion_tokens"] == 4


async def test_only_the_choice_that_met_it_ends(serve: Serve) -> None:
    link = FakeLink("ab", step_s=0.001)
    gateway = await serve(link)
    async with client_of(gateway) as client:
        body = {"prompt": ["x", "y"], "stop": "b", "n": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a"] * 4
    assert sorted(link.cancelled) == sorted(request.id for request in link.requests)


async def test_the_stop_string_is_kept_when_asked_for(serve: Serve) -> None:
    gateway = await serve(FakeLink("hello"))
    body = {"prompt": "x", "stop": "ll", "include_stop_str_in_output": True, "logprobs": 0}
    async with client_of(gateway) as client:
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == "hell"
    assert choice["logprobs"]["tokens"] == ["h", "e", "l", "l"]


async def test_the_prompts_own_text_never_ends_the_answer(serve: Serve) -> None:
    gateway = await serve(FakeLink("abc"))
    async with client_of(gateway) as client:
        body = {"prompt": "one. two", "stop": ".", "echo": True}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "one. twoabc"


async def test_a_stop_string_that_begins_and_does_not_end_is_given_out(serve: Serve) -> None:
    gateway = await serve(FakeLink("hello"))
    async with client_of(gateway) as client:
        body = {"prompt": "x", "stop": "lot", "stream": True}
        chunks = events((await client.post("/v1/completions", json=body)).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"


async def test_text_that_a_hidden_token_would_print_is_no_match(serve: Serve) -> None:
    gateway = await serve(FakeLink([101, 2, 102]))
    async with client_of(gateway) as client:
        body = {"prompt": "x", "stop": "<eot>"}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == "ab"
