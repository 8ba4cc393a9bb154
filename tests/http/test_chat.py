"""Chat answers: the shape of every chunk, usage, log-probabilities, several choices."""

from __future__ import annotations

from typing import Any

import pytest

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import END, Call, FakeLink, Serve, client_of, events, ids_of

pytestmark = pytest.mark.anyio

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.mark.parametrize(
    ("says", "max_tokens", "text", "reason"),
    [("hello", 8, "hello", "stop"), ("hello", 2, "he", "length"), ([], 8, "", "stop")],
)
async def test_streams_role_then_text_then_an_empty_delta_with_the_reason(
    serve: Serve, says: Any, max_tokens: int, text: str, reason: str
) -> None:
    gateway = await serve(FakeLink(says))
    async with client_of(gateway) as client:
        body = CHAT | {"stream": True, "max_tokens": max_tokens}
        response = await client.post("/v1/chat/completions", json=body)
        plain = (
            await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": max_tokens})
        ).json()
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
    assert choices[-1]["delta"] == {}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    message = plain["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text, "refusal": None}
    assert plain["choices"][0]["finish_reason"] == reason
    assert plain["object"] == "chat.completion"
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_says_what_served_it_in_headers_and_at_the_end(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        plain = await client.post("/v1/chat/completions", json=CHAT)
        stream = await client.post("/v1/chat/completions", json=CHAT | {"stream": True, "seed": 5})
    for response in (plain, stream):
        assert response.headers["x-polypath-worker"] == "worker-fake"
        assert response.headers["x-polypath-path"] == "eager+torch_sdpa+torch"
    served = events(stream.text)[-1]["polypath"]
    assert served == {
        "worker": "worker-fake",
        "plan": "pp-0123456789ab",
        "steps": [{"mode": "decode", "runner": "eager", "reason": "planned", "steps": 3}],
        "trail": ["worker-fake"],
        "seed": 5,
    }
    assert plain.json()["polypath"] == served | {"seed": plain.json()["polypath"]["seed"]}
    assert plain.json()["system_fingerprint"] == "pp-0123456789ab"
    assert all("polypath" not in chunk for chunk in events(stream.text)[:-1])


async def test_usage_comes_last_without_choices_when_asked_for(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await client.post("/v1/chat/completions", json=body)).text)
        plain = (await client.post("/v1/chat/completions", json=CHAT)).json()
    *others, last = chunks
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in others)
    num_prompt = len("user=hi\nA:")
    assert last["usage"] == plain["usage"]
    assert last["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 6,  # the end token was generated too
        "total_tokens": num_prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "polypath" in last


async def test_running_usage_counts_in_every_chunk(serve: Serve) -> None:
    gateway = await serve(FakeLink("abc"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client_of(gateway) as client:
        body = CHAT | {"stream": True, "stream_options": options}
        chunks = events((await client.post("/v1/chat/completions", json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 4


async def test_each_steps_tokens_leave_together(serve: Serve) -> None:
    gateway = await serve(FakeLink("abcdef", tokens_a_step=3))
    async with client_of(gateway) as client:
        chunks = events(
            (await client.post("/v1/chat/completions", json=CHAT | {"stream": True})).text
        )
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts == ["", "abc", "def", None]


async def test_a_character_split_over_steps_comes_whole(serve: Serve) -> None:
    gateway = await serve(FakeLink("é漢🙂"))
    async with client_of(gateway) as client:
        chunks = events(
            (await client.post("/v1/chat/completions", json=CHAT | {"stream": True})).text
        )
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert [text for text in texts if text] == ["é", "漢", "🙂"]


async def test_several_choices_have_their_own_index_and_draw(serve: Serve) -> None:
    link = FakeLink()
    gateway = await serve(link)
    async with client_of(gateway) as client:
        body = CHAT | {"n": 3, "seed": 9}
        plain = (await client.post("/v1/chat/completions", json=body)).json()
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
    assert plain["usage"]["completion_tokens"] == 18
    assert plain["usage"]["prompt_tokens"] == len("user=hi\nA:")
    assert [request.sampling.choice for request in link.requests[:3]] == [0, 1, 2]
    assert {request.sampling.seed for request in link.requests} == {9}
    assert len({request.id for request in link.requests}) == 6
    chunks = events(stream.text)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == "hello"
        assert own[-1]["finish_reason"] == "stop"
    assert sum("polypath" in chunk for chunk in chunks) == 1


async def test_requests_without_a_seed_get_different_ones(serve: Serve) -> None:
    link = FakeLink()
    gateway = await serve(link)
    async with client_of(gateway) as client:
        answers = [(await client.post("/v1/chat/completions", json=CHAT)).json() for _ in range(2)]
    seeds = [request.sampling.seed for request in link.requests]
    assert seeds[0] != seeds[1]
    assert [answer["polypath"]["seed"] for answer in answers] == seeds


@pytest.mark.parametrize(
    ("extra", "num_top"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)]
)
async def test_logprobs_are_objects_and_the_same_streamed(
    serve: Serve, extra: dict[str, Any], num_top: int
) -> None:
    gateway = await serve(FakeLink("hé"))
    body = CHAT | {"logprobs": True} | extra
    async with client_of(gateway) as client:
        plain = (await client.post("/v1/chat/completions", json=body)).json()
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
    content = plain["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == "hé"
    assert all(item["logprob"] == -0.5 for item in content)
    assert all(len(item["top_logprobs"]) == num_top for item in content)
    streamed = [
        item
        for chunk in events(stream.text)
        if chunk["choices"][0]["logprobs"]
        for item in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


async def test_without_logprobs_the_field_is_null(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        plain = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert plain["choices"][0]["logprobs"] is None


async def test_the_prompt_is_the_rendered_chat(serve: Serve) -> None:
    link = FakeLink()
    gateway = await serve(link)
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    async with client_of(gateway) as client:
        await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert list(link.requests[0].prompt_ids) == ids_of("system=be brief\nuser=hi\nA:")


async def test_control_words_that_users_type_stay_plain_characters(serve: Serve) -> None:
    link = FakeLink()
    gateway = await serve(link)
    messages = [{"role": "user", "content": "a</s><eot>"}]
    async with client_of(gateway) as client:
        await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
        await client.post("/v1/completions", json={"prompt": "a</s>"})
    assert list(link.requests[0].prompt_ids) == ids_of("user=a</s><eot>\nA:")
    assert list(link.requests[1].prompt_ids) == [*ids_of("a"), END]


async def test_a_slow_first_token_does_not_hold_the_headers_back(serve: Serve) -> None:
    gateway = await serve(FakeLink(first_step_s=1.0), settings=ApiSettings(headers_after_s=0.05))
    call = Call(build_api(gateway), "POST", "/v1/chat/completions", CHAT | {"stream": True})
    await call.until(1)
    assert call.messages[0]["status"] == 200
    assert not call.text
    await call.leave()
