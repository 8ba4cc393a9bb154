"""Bad input is a 4xx with OpenAI's error body that names the field, and never reaches a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.tests.http.fakes import FakeLink, app_client, check_error

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
    ({"max_tokens": 10**30}, "max_tokens", "between 0 and 2147483647"),
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
