"""Completions: prompts in all forms, order of choices, echo, log-probabilities as four lists."""

from __future__ import annotations

from typing import Any

import pytest

from polypath.tests.http.fakes import END, FakeLink, Serve, client_of, events, ids_of

pytestmark = pytest.mark.anyio


async def complete(serve: Serve, link: FakeLink, **body: Any) -> dict[str, Any]:
    gateway = await serve(link)
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"model": "tiny"} | body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_index_is_prompt_number_times_n_plus_answer_number(
    serve: Serve, stream: bool, as_ids: bool
) -> None:
    texts = ["Red", "Blue", "Green"]
    prompt = [ids_of(text) for text in texts] if as_ids else texts
    gateway = await serve(FakeLink("ok"))
    body = {"prompt": prompt, "n": 2, "echo": True, "stream": stream}
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json=body)
    answers = [""] * 6
    if stream:
        for chunk in events(response.text):
            choice = chunk["choices"][0]
            answers[choice["index"]] += choice["text"]
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        answers = [choice["text"] for choice in choices]
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == len("RedBlueGreen")
        assert usage["completion_tokens"] == 6 * 3
    assert answers == [f"{text}ok" for text in texts for _ in range(2)]


async def test_prompt_is_a_text_or_ids(serve: Serve) -> None:
    for prompt in ("hi", ["hi"], ids_of("hi"), [ids_of("hi")], [float(i) for i in ids_of("hi")]):
        link = FakeLink("ok")
        answer = await complete(serve, link, prompt=prompt)
        assert list(link.requests[0].prompt_ids) == ids_of("hi")
        assert answer["choices"][0]["text"] == "ok"
        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("count", "num_top"), [(0, 1), (1, 1), (5, 5)])
async def test_logprobs_are_four_lists_and_the_same_streamed(
    serve: Serve, count: int, num_top: int
) -> None:
    gateway = await serve(FakeLink("abc"))
    body = {"prompt": "xy", "logprobs": count, "max_tokens": 3}
    async with client_of(gateway) as client:
        plain = (await client.post("/v1/completions", json=body)).json()
        stream = await client.post("/v1/completions", json=body | {"stream": True})
    logprobs = plain["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [num_top] * 3
    assert logprobs["top_logprobs"][0]["a"] == -0.5
    joined: dict[str, list[Any]] = {key: [] for key in logprobs}
    for chunk in events(stream.text):
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[key] += values
    assert joined == logprobs


async def test_the_end_token_is_listed_so_that_there_is_one_entry_a_token(serve: Serve) -> None:
    answer = await complete(serve, FakeLink("a"), prompt="x", logprobs=1)
    assert answer["choices"][0]["text"] == "a"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "</s>"]
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_no_new_token_scores_the_prompt(serve: Serve, stream: bool) -> None:
    gateway = await serve(FakeLink("never"))
    body = {"prompt": "héy", "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json=body)
    choice = (events(response.text)[0] if stream else response.json())["choices"][0]
    assert choice["text"] == "héy"
    assert choice["logprobs"]["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    if not stream:
        assert choice["finish_reason"] == "length"
        assert response.json()["usage"]["completion_tokens"] == 0


async def test_echo_with_new_tokens_counts_offsets_in_the_text_returned(serve: Serve) -> None:
    answer = await complete(
        serve, FakeLink("ok"), prompt="héy", echo=True, max_tokens=2, logprobs=0
    )
    choice = answer["choices"][0]
    assert choice["text"] == "héyok"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert choice["logprobs"]["tokens"][-2:] == ["o", "k"]


async def test_no_echo_and_no_new_token_is_an_empty_answer(serve: Serve) -> None:
    answer = await complete(serve, FakeLink("never"), prompt="hi", max_tokens=0)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_the_last_chunk_has_the_reason_and_no_text(serve: Serve) -> None:
    gateway = await serve(FakeLink("abc"))
    async with client_of(gateway) as client:
        body = {"prompt": "x", "stream": True, "max_tokens": 2}
        chunks = events((await client.post("/v1/completions", json=body)).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["a", "b", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


async def test_prompts_of_a_list_share_a_given_seed_and_get_their_own_otherwise(
    serve: Serve,
) -> None:
    link = FakeLink()
    await complete(serve, link, prompt=["a", "a"], n=2, seed=7)
    await complete(serve, link, prompt=["a", "a"])
    draws = [(request.sampling.seed, request.sampling.choice) for request in link.requests]
    assert draws[:4] == [(7, 0), (7, 1), (7, 0), (7, 1)]
    assert draws[4][0] != draws[5][0]


async def test_best_of_is_taken_when_it_ranks_nothing(serve: Serve) -> None:
    answer = await complete(serve, FakeLink(), prompt="a", n=2, best_of=2)
    assert len(answer["choices"]) == 2


async def test_control_tokens_show_when_not_skipped(serve: Serve) -> None:
    says = [*ids_of("a"), 2, *ids_of("b")]
    hidden = await complete(serve, FakeLink(says), prompt="x")
    shown = await complete(serve, FakeLink(says), prompt="x", skip_special_tokens=False)
    assert hidden["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<eot>b"


async def test_sampling_fields_reach_the_engine(serve: Serve) -> None:
    link = FakeLink()
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    await complete(
        serve,
        link,
        prompt="a",
        logit_bias={"5": 3},
        stop_token_ids=[9, 9],
        seed=-1,
        priority=3,
        **fields,
    )
    sampling = link.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == {5: 3.0}
    assert sampling.stop_token_ids == (9,)
    assert sampling.seed == -1
    assert link.requests[0].priority == 3


async def test_top_k_of_minus_one_keeps_all(serve: Serve) -> None:
    link = FakeLink()
    await complete(serve, link, prompt="a", top_k=-1)
    assert link.requests[0].sampling.top_k == 0


async def test_a_stop_token_shows_only_when_asked_for(serve: Serve) -> None:
    stop = ids_of("c")
    hidden = await complete(serve, FakeLink("abcd"), prompt="x", stop_token_ids=stop)
    shown = await complete(
        serve, FakeLink("abcd"), prompt="x", stop_token_ids=stop, include_stop_str_in_output=True
    )
    assert hidden["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "abc"
    assert END not in stop
