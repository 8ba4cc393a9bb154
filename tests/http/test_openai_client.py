"""OpenAI's own package over HTTP against a real engine: answers, streams, errors, leaving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from polypath.actors.worker import Worker
from polypath.tests.http.live import live_gateway, openai_client, start_worker, until_idle
from polypath.tests.tiny_models import random, script

pytestmark = pytest.mark.anyio
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Says "Hello" after a colon, then ends."""
    folder = tmp_path_factory.mktemp("script")
    script(folder, ["Helo", " wrd!", "</s>"])
    worker = start_worker(folder)
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def random_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("random")
    random(folder)
    worker = start_worker(folder)
    yield worker
    worker.stop()


@pytest.fixture
async def client(worker: Worker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with live_gateway(worker) as gateway, openai_client(gateway) as client:
        yield client
    await until_idle(worker)


@pytest.fixture
async def random_client(random_worker: Worker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with live_gateway(random_worker) as gateway, openai_client(gateway) as client:
        yield client
    await until_idle(random_worker)


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "Helo wrd!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("pp-")


async def test_streamed_chat_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Helo wrd!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].model_extra is not None
    steps = chunks[-1].model_extra["polypath"]["steps"]
    assert sum(step["steps"] for step in steps) == 10


async def test_stop_string_n_and_max_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, n=2, stop=["wr"], max_tokens=9
    )
    assert [choice.message.content for choice in answer.choices] == ["Helo ", "Helo "]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    steps = (answer.model_extra or {})["polypath"]["steps"]
    assert steps, "the counts of a cancelled request come too"


async def test_completions_with_echo_and_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=["a:", "bc:"], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    assert [choice.text for choice in answer.choices] == ["a:H", "bc:H"]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["b", "c", ":", "H"]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


@pytest.mark.parametrize("length", [1, 20, 300])
async def test_scoring_a_text_twice_gives_the_same_numbers(
    random_client: openai.AsyncOpenAI, length: int
) -> None:
    answers = [
        await random_client.completions.create(
            model="tiny", prompt="x" * length, echo=True, logprobs=1, max_tokens=0
        )
        for _ in range(2)
    ]
    scores = [answer.choices[0].logprobs for answer in answers]
    assert scores[0] == scores[1]
    assert scores[0] is not None
    assert scores[0].token_logprobs is not None
    assert len(scores[0].token_logprobs) == length
    assert answers[0].choices[0].text == "x" * length
    assert answers[0].choices[0].finish_reason == "length"


async def test_the_same_seed_repeats_its_text(random_client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int | None) -> str:
        answer = await random_client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=seed, max_tokens=20, logprobs=True
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        return str([item.bytes for item in logprobs.content or []])

    assert await ask(-5) == await ask(-5)
    assert await ask(2**63) == await ask(2**63)
    assert await ask(None) != await ask(None)


async def test_streamed_pieces_joined_are_the_unstreamed_answer(
    random_client: openai.AsyncOpenAI,
) -> None:
    ask: Any = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 60, "n": 2}
    plain = await random_client.chat.completions.create(**ask)
    texts = ["", ""]
    async for chunk in await random_client.chat.completions.create(**ask, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]


async def test_errors_have_openais_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"


async def test_leaving_a_stream_empties_the_engine(
    random_client: openai.AsyncOpenAI, random_worker: Worker
) -> None:
    stream = await random_client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, n=3, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await until_idle(random_worker)
    requests = random_worker.stats()["requests_total"]
    assert isinstance(requests, dict)
    assert requests["cancelled"] == 3


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
