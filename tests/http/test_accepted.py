"""What clients send and must not trip over: nulls, empty lists, fields that change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from polypath.tests.http.fakes import FakeLink, Serve, client_of, ids_of

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NULLABLE = [
    *("model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens"),
    *("max_completion_tokens", "n", "presence_penalty", "response_format", "seed", "stop"),
    *("stream", "stream_options", "temperature", "top_p", "tools", "tool_choice", "user"),
    *("parallel_tool_calls", "metadata", "store", "service_tier", "reasoning_effort", "audio"),
    *("modalities", "prediction", "functions", "function_call", "web_search_options", "verbosity"),
    *("safety_identifier", "prompt_cache_key", "prompt_logprobs", "chat_template", "documents"),
]
HARMLESS: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": [], "tool_choice": "auto"},
    {"tools": [], "tool_choice": "none"},
    {"tools": [{"type": "function"}], "tool_choice": "none"},
    {"stop": []},
    {"logit_bias": {}},
    {"stream_options": {}},
    {"response_format": {"type": "text"}},
    {"metadata": {}},
    {"metadata": {"job": "7"}},
    {"user": "u", "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k"},
    {"store": False, "modalities": ["text"], "parallel_tool_calls": True},
    {"repetition_penalty": 1.0, "ignore_eos": False, "top_k": -1, "min_p": 0.0, "min_tokens": 0},
    {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True, "request_id": "r"},
    {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
    {"chat_template_kwargs": {}, "echo": False, "include_reasoning": True},
    {"max_tokens": 9.0, "n": 1.0},
    {"max_tokens": 9, "max_completion_tokens": 9},
    {"function_call": "none", "functions": []},
]


async def ask(serve: Serve, **body: Any) -> tuple[dict[str, Any], list[int]]:
    link = FakeLink()
    gateway = await serve(link)
    async with client_of(gateway) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | body)
    assert response.status_code == 200, response.text
    return response.json(), list(link.requests[0].prompt_ids)


@pytest.mark.parametrize("extra", [dict.fromkeys(NULLABLE), *({name: None} for name in NULLABLE)])
async def test_null_is_the_same_as_absent(serve: Serve, extra: dict[str, Any]) -> None:
    answer, prompt = await ask(serve, **extra)
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert prompt == ids_of("user=hi\nA:")


@pytest.mark.parametrize("extra", HARMLESS)
async def test_a_field_that_changes_nothing_is_taken(serve: Serve, extra: dict[str, Any]) -> None:
    answer, prompt = await ask(serve, **extra)
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert prompt == ids_of("user=hi\nA:")


async def test_what_vllm_bench_and_guidellm_send_is_taken(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    bodies = [
        {
            "model": "tiny",
            "prompt": "hi",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "stop": None,
            "ignore_eos": True,
            "temperature": 0.0,
        },
        {
            "model": "tiny",
            "prompt": [ids_of("hi")],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ]
    async with client_of(gateway) as client:
        for body in bodies:
            assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), 0, 7.0])
async def test_64_bit_seeds_are_taken_as_they_are(serve: Serve, seed: float) -> None:
    answer, _ = await ask(serve, seed=seed)
    assert answer["polypath"]["seed"] == seed


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool", "developer", "function"])
async def test_text_parts_work_in_every_role(serve: Serve, role: str) -> None:
    parts = [{"type": "text", "text": "tell me a "}, {"type": "text", "text": "riddle"}]
    _, from_parts = await ask(serve, messages=[{"role": role, "content": parts}])
    _, from_text = await ask(serve, messages=[{"role": role, "content": "tell me a riddle"}])
    assert from_parts == from_text


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_empty_content_is_fine(serve: Serve, content: Any) -> None:
    _, prompt = await ask(serve, messages=[{"role": "user", "content": content}])
    assert prompt == ids_of("user=\nA:")


async def test_a_refusal_in_the_history_is_the_assistants_text(serve: Serve) -> None:
    parts = [{"type": "refusal", "refusal": "no"}]
    for message in ({"content": parts}, {"content": None, "refusal": "no"}):
        _, prompt = await ask(serve, messages=[{"role": "assistant"} | message])
        assert prompt == ids_of("assistant=no\nA:")


async def test_tool_calls_in_the_history_give_one_prompt_and_a_warning(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    prompts = []
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call], "refusal": None, "annotations": []}
            | content,
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "tool", "content": "no id"},
        ]
        answer, prompt = await ask(serve, messages=messages)
        prompts.append(prompt)
        assert "knows no tool calls" in answer["polypath"]["warnings"][0]
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[0] == ids_of("user=hi\nassistant=\ntool=42\ntool=no id\nA:")


async def test_the_last_message_may_be_the_assistants(serve: Serve) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    messages.append({"role": "assistant", "content": "c"})
    _, prompt = await ask(serve, messages=messages)
    assert prompt == ids_of("user=a\nuser=b\nassistant=c\nA:")


async def test_the_generation_prompt_can_be_left_out(serve: Serve) -> None:
    _, prompt = await ask(serve, add_generation_prompt=False)
    assert prompt == ids_of("user=hi\n")
