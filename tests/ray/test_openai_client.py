"""The official openai package against a live application: what real clients send and expect."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from polypath.tests.driving import planned_header
from polypath.tests.ray.running_server import RunningServer

pytestmark = pytest.mark.ray

MODEL = "tiny"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
ENDLESS = {"ignore_eos": True}


def test_models_are_listed_with_their_context(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.to_dict()["max_model_len"] == 8192


def test_chat_answers_and_says_who_served(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=8, temperature=0, extra_body=ENDLESS
    )
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("pp-")
    assert "," not in raw.headers["x-request-id"]
    assert raw.headers["x-polypath-worker"].startswith("worker-")
    assert raw.headers["x-polypath-path"] == planned_header()
    assert answer.to_dict()["polypath"]


def test_a_stream_joined_is_the_unstreamed_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=24, temperature=0, extra_body=ENDLESS
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=ENDLESS,
        )
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_completions_take_lists_and_n_in_order(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["Red", "Blue"], n=2, echo=True, max_tokens=4, extra_body=ENDLESS
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    starts = ["Red", "Red", "Blue", "Blue"]
    assert all(
        choice.text.startswith(start) for choice, start in zip(answer.choices, starts, strict=True)
    )


def test_logprobs_have_openais_two_shapes(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2, extra_body=ENDLESS
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 3
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs.content)
    completion = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=3, logprobs=1, extra_body=ENDLESS
    )
    found = completion.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert len(found.tokens) == len(found.text_offset) == 3


def test_a_seed_repeats_its_text_and_another_differs(client: OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=24, seed=seed, extra_body=ENDLESS
        )
        return answer.choices[0].text

    assert ask(7) == ask(7) != ask(8)


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=24, temperature=0, extra_body=ENDLESS
    )
    text = whole.choices[0].text
    stop = text[8:10]
    answer = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=24, temperature=0, stop=[stop], extra_body=ENDLESS
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]


def test_an_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "model_not_found"


def test_a_parameter_out_of_range_is_400_and_named(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"


def test_what_only_the_engine_can_refuse_keeps_its_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1] * 9000, max_tokens=1)
    assert "9000" in str(caught.value) and "8192" in str(caught.value)


def test_leaving_a_stream_frees_its_pages(client: OpenAI, server: RunningServer) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=8000, stream=True, extra_body=ENDLESS
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    assert server.worker()["stats"]["running"] == 1
    generated = server.worker()["stats"]["generation_tokens_total"]
    stream.close()
    stats = server.wait_until_idle()
    assert stats["requests_total"].get("cancelled", 0) >= 1
    assert stats["generation_tokens_total"] - generated < 4000


def test_leaving_an_answer_that_is_not_streamed_frees_its_pages(
    client: OpenAI, server: RunningServer
) -> None:
    server.wait_until_idle()
    before = server.worker()["stats"]["requests_total"].get("cancelled", 0)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=8000, n=2, timeout=1.0, extra_body=ENDLESS
        )
    stats = server.wait_until_idle()
    assert stats["requests_total"].get("cancelled", 0) - before == 2


def test_a_full_queue_is_429_with_retry_after_and_the_rest_is_served(
    client: OpenAI, server: RunningServer
) -> None:
    server.wait_until_idle()

    def ask(_: int) -> str:
        try:
            client.completions.create(
                model=MODEL, prompt="Hello", max_tokens=300, extra_body=ENDLESS
            )
        except openai.RateLimitError as error:
            assert int(error.response.headers["retry-after"]) >= 1
            return "refused"
        return "served"

    with ThreadPoolExecutor(24) as pool:
        outcomes = list(pool.map(ask, range(24)))
    assert outcomes.count("served") >= 8
    assert outcomes.count("refused") >= 1
    server.wait_until_idle()


def test_the_same_request_id_ten_times_is_ten_answers(
    client: OpenAI, server: RunningServer
) -> None:
    server.wait_until_idle()

    def ask(number: int) -> str:
        answer = client.completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=20,
            extra_headers={"X-Request-Id": "same"},
            extra_body=ENDLESS,
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 20
        return answer.id

    cancelled = client.completions.create(
        model=MODEL,
        prompt="Hello",
        max_tokens=8000,
        stream=True,
        extra_headers={"X-Request-Id": "same"},
        extra_body=ENDLESS,
    )
    next(iter(cancelled))
    with ThreadPoolExecutor(5) as pool:
        first = pool.map(ask, range(5))
        cancelled.close()
        ids = [*first, *pool.map(ask, range(5))]
    assert len(set(ids)) == 10
    server.wait_until_idle()


def test_an_idle_connection_outlives_a_pause(server: RunningServer) -> None:
    address = urlsplit(server.url)
    connection = HTTPConnection(str(address.hostname), address.port, timeout=30)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().read()
    first = connection.sock
    time.sleep(6)  # uvicorn's default would have closed it after 5 s
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200
    assert connection.sock is first, "the client had to connect anew"
    connection.close()
