"""What the server tells about itself: models, health, paths, metrics, tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polypath.actors.place import Place
from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.runtime.errors import EngineError
from polypath.tests.http.fakes import END, FakeLink, Serve, client_of, ids_of

pytestmark = pytest.mark.anyio


async def test_models_have_their_context_length(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        models = (await client.get("/v1/models")).json()
        model = (await client.get("/v1/models/tiny")).json()
        missing = await client.get("/v1/models/gpt-9")
    assert models == {"object": "list", "data": [model]}
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_a_name_with_a_slash_is_found(tiny: Checkpoint) -> None:
    gateway = Gateway()
    gateway.add_checkpoint(tiny, name="org/tiny")
    await gateway.add_worker(FakeLink(model="org/tiny"))
    async with client_of(gateway) as client:
        assert (await client.get("/v1/models/org/tiny")).json()["id"] == "org/tiny"
    gateway.close()


async def test_a_worker_of_an_unknown_model_is_not_taken(serve: Serve) -> None:
    gateway = await serve()
    with pytest.raises(EngineError, match="does not know"):
        await gateway.add_worker(FakeLink(model="other"))


async def test_with_two_models_a_request_must_name_one(serve: Serve, tiny: Checkpoint) -> None:
    gateway = await serve(FakeLink())
    gateway.add_checkpoint(tiny, name="second")
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 400
    assert "tiny, second" in response.json()["error"]["message"]


STATS = {"running": 1, "waiting": 0, "heartbeat_age_s": 100.0}


@pytest.mark.parametrize(
    ("stats", "is_dead", "status", "state"),
    [
        (None, False, 200, "ok"),
        (STATS, False, 503, "no step for 60 s"),
        (STATS | {"running": 0}, False, 200, "ok"),
        (STATS | {"heartbeat_age_s": 59.0}, False, 200, "ok"),
        (None, True, 503, "no worker answers"),
    ],
)
async def test_health_is_an_answer_over_the_link_and_a_living_step_loop(
    serve: Serve, stats: Any, is_dead: bool, status: int, state: str
) -> None:
    link = FakeLink()
    link.stats_answer, link.is_dead = stats, is_dead
    gateway = await serve(link)
    async with client_of(gateway) as client:
        response = await client.get("/health")
    assert response.status_code == status
    assert response.json()["models"] == {"tiny": state}


async def test_one_living_worker_is_health_enough(serve: Serve) -> None:
    dead = FakeLink(worker_id="dead")
    dead.is_dead = True
    gateway = await serve(dead, FakeLink())
    async with client_of(gateway) as client:
        assert (await client.get("/health")).status_code == 200
        up = (await client.get("/metrics")).text
    assert 'worker="dead"} 0.0' in up
    assert 'worker="worker-fake"} 1.0' in up


async def test_a_worker_that_does_not_answer_holds_nothing_up(serve: Serve) -> None:
    class SilentLink(FakeLink):
        async def stats(self) -> dict[str, Any]:
            await asyncio.sleep(10)
            raise AssertionError("nobody waits this long")

    gateway = await serve(SilentLink(), settings=ApiSettings(stats_timeout_s=0.05))
    async with client_of(gateway) as client:
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v1/paths")).json()["data"][0]["stats"] is None


async def test_a_suspended_worker_keeps_nobody_waiting_who_asks_for_health(serve: Serve) -> None:
    """A load balancer waits a second or two."""

    class Suspended(FakeLink):
        async def stats(self) -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError("asked for too long")

    gateway = await serve(Suspended(worker_id="suspended"), FakeLink())
    async with client_of(gateway) as client:
        async with asyncio.timeout(1):
            assert (await client.get("/health")).json()["models"] == {"tiny": "ok"}
        gateway.remove_worker("worker-fake")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get("/health")


async def test_health_without_a_worker_is_unavailable(serve: Serve) -> None:
    gateway = await serve()
    async with client_of(gateway) as client:
        response = await client.get("/health")
    assert (response.status_code, response.json()["models"]) == (503, {"tiny": "no worker"})


async def test_paths_show_plan_hardware_and_counts(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        (path,) = (await client.get("/v1/paths")).json()["data"]
    assert path["worker_id"] == "worker-fake"
    assert path["plan"] == {"device": "cpu"}
    assert path["path"]["decode"] == "eager+torch_sdpa+torch"
    assert path["steps"] == [{"mode": "decode", "runner": "eager", "reason": "planned", "count": 5}]
    assert path["stats"]["kv_pages_total"] == 100


async def test_each_worker_is_shown_with_its_pool_and_node(serve: Serve) -> None:
    class PlacedLink(FakeLink):
        async def describe(self) -> dict[str, Any]:
            place = Place(pool=f"pool-{self.worker_id}", node_id="a1", labels={"zone": "b"})
            return await super().describe() | place.to_json()

    gateway = await serve(PlacedLink(worker_id="w1"), PlacedLink(worker_id="w2"))
    async with client_of(gateway) as client:
        paths = (await client.get("/v1/paths")).json()["data"]
        (model,) = (await client.get("/v1/models")).json()["data"]
        metrics = (await client.get("/metrics")).text
    assert [path["pool"] for path in paths] == ["pool-w1", "pool-w2"]
    assert paths[0]["node"] == {"id": "a1", "address": "", "labels": {"zone": "b"}}
    assert (model["workers"], model["pools"]) == (2, {"pool-w1": 1, "pool-w2": 1})
    assert 'polypath_worker_running{model="tiny",pool="pool-w1",worker="w1"}' in metrics
    assert 'pool="pool-w2",worker="w2"} 1.0' in metrics


async def test_worker_counters_are_the_same_from_any_gateway(serve: Serve) -> None:
    link = FakeLink()
    texts = []
    for gateway in (await serve(link), await serve(link)):
        async with client_of(gateway) as client:
            await client.post("/v1/completions", json={"prompt": "x"})
            text = (await client.get("/metrics")).text
        texts.append([line for line in text.splitlines() if line.startswith("polypath_worker_")])
        assert (
            f'polypath_gateway_first_token_seconds_count{{gateway="{gateway.id}",model="tiny"}} 1.0'
            in text
        )
    assert texts[0] == texts[1]
    own = 'model="tiny",pool="",worker="worker-fake"'
    expected = [
        f"polypath_worker_prompt_tokens_total{{{own}}} 7.0",
        f'polypath_worker_requests_total{{finish_reason="stop",{own}}} 2.0',
        'polypath_worker_steps_total{mode="decode",model="tiny",pool="",reason="planned",'
        'runner="eager",worker="worker-fake"} 5.0',
    ]
    assert set(expected) <= set(texts[0])


async def test_metrics_count_responses_by_route_not_by_path(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        for number in range(3):
            await client.get(f"/v1/models/m{number}")
            await client.get(f"/nowhere/{number}")
        text = (await client.get("/metrics")).text
    assert 'route="/v1/models/{model_id:path}",status="404"} 3.0' in text
    assert 'route="unmatched",status="404"} 3.0' in text


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(serve: Serve, prefix: str) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        body = {"prompt": "hé</s>", "return_token_strs": True}
        answer = (await client.post(f"{prefix}/tokenize", json=body)).json()
        ids = answer["tokens"]
        text = (await client.post(f"{prefix}/detokenize", json={"tokens": ids})).json()
    assert ids == [*ids_of("hé"), END]
    assert answer["count"] == 4
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert text == {"prompt": "hé</s>"}


async def test_tokenize_renders_messages(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        body = {"messages": [{"role": "user", "content": "hi</s>"}], "add_generation_prompt": False}
        answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == ids_of("user=hi</s>\n")
    assert answer["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [260]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5] * 513}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [5, 10**30]}, "tokens[1]"),
    ],
)
async def test_wrong_tokenize_bodies_are_named(
    serve: Serve, path: str, body: dict[str, Any], param: str
) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_the_front_page_and_the_schema_say_what_there_is(serve: Serve) -> None:
    gateway = await serve(FakeLink())
    async with client_of(gateway) as client:
        page = (await client.get("/")).json()
        schema = (await client.get("/openapi.json")).json()
    assert page["models"] == ["tiny"]
    assert "/v1/chat/completions" in schema["paths"]
    fields = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "temperature" in str(fields)
