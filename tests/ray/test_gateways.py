"""Two gateways and three paced workers at 4:1 on three labelled nodes, behind Serve's proxy:
traffic, requirements, limits, draining, leaving clients, and the loss of a gateway.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polypath.deployments.keys import hash_key
from polypath.tests.ray.deploying import Deployer, deploying
from polypath.tests.ray.labelled_cluster import labelled_cluster
from polypath.tests.ray.test_named_cluster import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FAST_MS, SLOW_MS = 50, 200
NODES = [
    {"num_cpus": 2, "labels": {"pool": "head"}},
    {"num_cpus": 1, "labels": {"pool": "fast", "step_ms": str(FAST_MS), "lacks": "penalties"}},
    {"num_cpus": 1, "labels": {"pool": "slow", "step_ms": str(SLOW_MS)}},
]
USER, LIMITED, ADMIN = "pp-user", "pp-limited", "pp-admin"
KEYS = [
    {"name": "user", "hash": hash_key(USER)},
    {"name": "limited", "hash": hash_key(LIMITED), "requests_per_minute": 20},
    {"name": "admin", "hash": hash_key(ADMIN), "role": "admin"},
]
SAYS = "abcdefgh"  # of every paced worker, over and over
START_LIMIT_S = 180.0


class Site:
    """The proxy's address and what one asks there."""

    def __init__(self, model: Path, deployer: Deployer, cluster_pid: int) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._model = model
        self._deployer = deployer
        self._cluster = psutil.Process(cluster_pid)

    def deploy(self, num_slow: int) -> None:
        pools = [
            {"name": "fast", "num_cpus": 0.5, "label_selector": {"pool": "fast"}},
            {"name": "slow", "num_cpus": 0.5, "label_selector": {"pool": "slow"}},
        ]
        model = {"model": str(self._model), "name": "tiny", "engine": {"max_num_seqs": 8}}
        # Serve's proxy prefers a gateway of its own node: the other one would hardly be used.
        head = {"num_cpus": 0.25, "label_selector": {"pool": "head"}}
        overrides = [
            {"name": "gateway", "num_replicas": 2, "ray_actor_options": head},
            {"name": "tiny.slow", "num_replicas": num_slow},
        ]
        application = {
            "name": "paced",
            "route_prefix": "/",
            "import_path": "polypath.tests.ray.own_replicas:paced_app",
            "args": {"models": [model | {"pools": pools}], "auth": {"keys": KEYS}},
            "deployments": overrides,
        }
        http = {"host": "127.0.0.1", "port": self.port}
        self._deployer.deploy(
            {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        )

    def get(self, path: str) -> Any:  # JSON
        headers = {"Authorization": f"Bearer {ADMIN}"}
        return httpx.get(self.url + path, headers=headers, timeout=30, trust_env=False).json()

    def post(self, path: str) -> Any:  # JSON
        headers = {"Authorization": f"Bearer {ADMIN}"}
        return httpx.post(self.url + path, headers=headers, timeout=30, trust_env=False).json()

    def client(self, key: str = USER) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
            limits=httpx.Limits(max_connections=200),
        )

    def workers(self) -> dict[str, dict[str, Any]]:
        """By id, those that answer."""
        data = self.get("/v1/paths")["data"]
        return {each["worker_id"]: each for each in data if each["stats"] is not None}

    def has_two_gateways(self) -> bool:
        """Whether two answered some calls, each of which knows three workers."""
        answers = [self.get("/admin/workers") for _ in range(12)]
        known = {answer["gateway"]: len(answer["data"]) for answer in answers}
        return list(known.values()) == [3, 3]

    def gateway_processes(self) -> list[psutil.Process]:
        title = "ServeReplica:paced:gateway"
        family = self._cluster.children(recursive=True)
        return [process for process in family if title in " ".join(process.cmdline())]

    def wait(self, what: str, limit_s: float, is_true: Any) -> None:  # called without arguments
        deadline = time.monotonic() + limit_s
        while True:
            try:
                if is_true():
                    return
            except (httpx.HTTPError, json.JSONDecodeError, KeyError, psutil.Error):
                pass  # not there yet
            assert time.monotonic() < deadline, f"not after {limit_s:.0f} s: {what}"
            time.sleep(0.3)

    def wait_until_idle(self) -> None:
        def is_idle() -> bool:
            stats = [worker["stats"] for worker in self.workers().values()]
            return not any(each["running"] or each["waiting"] for each in stats)

        self.wait("all workers are idle", 15, is_idle)

    def num_tokens(self) -> dict[str, int]:
        """That each worker has made so far."""
        workers = self.workers()
        return {name: each["stats"]["generation_tokens_total"] for name, each in workers.items()}


@pytest.fixture(scope="module")
def site(no_server: None, tiny_model: Path) -> Iterator[Site]:
    with labelled_cluster(NODES) as cluster, deploying(cluster) as deployer:
        found = Site(tiny_model, deployer, cluster.pid)
        found.deploy(num_slow=2)
        found.wait("two gateways with three workers", START_LIMIT_S, found.has_two_gateways)
        yield found


def body(num_tokens: int = 30, **fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": "x", "max_tokens": num_tokens, "ignore_eos": True}
    return asked | fields


def said(num_tokens: int) -> str:
    return "".join(SAYS[n % len(SAYS)] for n in range(num_tokens))


async def complete(
    client: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    asked = body(**fields)
    answer = await client.post("/v1/completions", json=asked, headers=headers or {})
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["text"] == said(asked["max_tokens"])
    return answer


async def stream(client: httpx.AsyncClient, num_tokens: int, **given: Any) -> dict[str, Any]:
    """One streamed answer: text, whether it came to its end, and what its last chunk says."""
    found: dict[str, Any] = {"text": "", "is_whole": False, "polypath": {}}
    asked = body(num_tokens, stream=True)
    try:
        async with client.stream("POST", "/v1/completions", json=asked, **given) as response:
            found["status"] = response.status_code
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    found["is_whole"] = True
                elif line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return found
                    found["text"] += "".join(choice["text"] for choice in chunk["choices"])
                    found["polypath"] = chunk.get("polypath") or found["polypath"]
    except httpx.HTTPError as error:
        found["error"] = error
    return found


def test_traffic_follows_measured_speed_over_both_gateways(site: Site) -> None:
    """48 clients: of 10 s in the middle each worker's tokens are within 15% of its share."""

    async def load() -> list[dict[str, int]]:
        is_over = False

        async def one() -> None:
            while not is_over:
                await complete(client, num_tokens=20)

        async with site.client() as client:
            clients = [asyncio.create_task(one()) for _ in range(48)]
            looks = []
            for seconds in (3, 10):
                await asyncio.sleep(seconds)
                looks.append(await asyncio.to_thread(site.num_tokens))
            is_over = True
            await asyncio.gather(*clients)
        return looks

    before, after = asyncio.run(load())
    made = {name: count - before[name] for name, count in after.items()}
    pools = {name: worker["pool"] for name, worker in site.workers().items()}
    speeds = {name: 1 / (FAST_MS if pool == "fast" else SLOW_MS) for name, pool in pools.items()}
    shares = {name: speed / sum(speeds.values()) for name, speed in speeds.items()}
    found = {name: count / sum(made.values()) for name, count in made.items()}
    for name, pool in pools.items():
        print(f"{pool}: {found[name]:.3f} of {sum(made.values())} tokens, {shares[name]:.3f} due")
    for name, share in shares.items():
        assert found[name] == pytest.approx(share, rel=0.15)


def test_what_a_worker_lacks_never_reaches_it(site: Site) -> None:
    fast = next(name for name, each in site.workers().items() if each["pool"] == "fast")

    async def ask() -> Counter[bool]:
        async with site.client() as client:
            plain = [complete(client, num_tokens=4) for _ in range(10)]
            needy = [complete(client, num_tokens=4, presence_penalty=0.5) for _ in range(40)]
            answers = await asyncio.gather(*plain, *needy)
        assert all(answer.status_code == 200 for answer in answers)
        assert any(answer.headers["x-polypath-worker"] == fast for answer in answers[:10])
        return Counter(answer.headers["x-polypath-worker"] == fast for answer in answers[10:])

    assert asyncio.run(ask()) == {False: 40}


def test_what_nobody_has_is_a_400_that_names_it(site: Site) -> None:
    async def ask() -> httpx.Response:
        async with site.client() as client:
            wants = {"x-polypath-require": "pool=fast"}
            return await complete(client, wants, num_tokens=4, presence_penalty=0.5)

    answer = asyncio.run(ask())
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "penalties, pool=fast" in message and "it has no penalties" in message


def test_a_limit_holds_over_both_gateways(site: Site) -> None:
    async def ask() -> Counter[int]:
        async with site.client(LIMITED) as client:
            answers = await asyncio.gather(*(complete(client, num_tokens=2) for _ in range(50)))
        return Counter(answer.status_code for answer in answers)

    assert asyncio.run(ask()) == {200: 20, 429: 30}
    limits = {each["name"]: each for each in site.get("/admin/limits")["data"]}
    assert limits["limited"]["requests_per_minute"]["used"] == 20


def test_a_worker_drained_at_one_gateway_gets_nothing_from_the_other(site: Site) -> None:
    fast = next(name for name, each in site.workers().items() if each["pool"] == "fast")

    async def used() -> Counter[bool]:
        async with site.client() as client:
            answers = [await complete(client, num_tokens=1) for _ in range(30)]
        return Counter(answer.headers["x-polypath-worker"] == fast for answer in answers)

    assert asyncio.run(used())[True] == 30, "alone it is the soonest done"
    assert site.post(f"/admin/workers/{fast}/drain")["is_draining"] is True
    time.sleep(0.2)  # the other gateway hears it over its own road
    try:
        assert asyncio.run(used()) == {False: 30}
    finally:
        site.post(f"/admin/workers/{fast}/undrain")
    time.sleep(0.2)
    assert asyncio.run(used())[True] == 30


def test_a_storm_of_leavers_leaves_nothing(site: Site) -> None:
    async def storm() -> int:
        rng = random.Random(5)

        async def leave(client: httpx.AsyncClient, after_s: float) -> bool:
            try:
                async with asyncio.timeout(after_s):
                    await stream(client, 400)
            except TimeoutError:
                return True
            return False

        async with site.client() as client:
            waits = [rng.choice([0.05, 0.3, 1.0, 2.0]) for _ in range(90)]
            return sum(await asyncio.gather(*(leave(client, each) for each in waits)))

    assert asyncio.run(storm()) == 90
    site.wait_until_idle()
    assert all(each["in_flight"] == 0 for each in site.get("/admin/workers")["data"])


def test_a_killed_gateway_ends_its_streams_and_frees_its_requests(site: Site) -> None:
    async def run(killed: psutil.Process) -> list[dict[str, Any]]:
        async with site.client() as client:
            tasks = [asyncio.create_task(stream(client, 60)) for _ in range(24)]
            await asyncio.sleep(1.5)
            killed.send_signal(signal.SIGKILL)
            began = time.monotonic()
            answers = await asyncio.gather(*tasks)
            print(f"all clients knew after {time.monotonic() - began:.1f} s")
        return answers

    whole: list[dict[str, Any]] = []
    broken: list[dict[str, Any]] = []
    for _ in range(3):  # Serve's proxy may have given all streams to one gateway
        site.wait("two gateways", 90, site.has_two_gateways)
        answers = asyncio.run(run(site.gateway_processes()[0]))
        whole += [answer for answer in answers if answer["is_whole"]]
        broken += [answer for answer in answers if not answer["is_whole"]]
        print(f"{len(whole)} streams of the other gateway ended, {len(broken)} broke")
        if whole and broken:
            break
    assert whole and broken
    assert all(answer["text"] == said(60) for answer in whole)
    for answer in broken:
        assert answer["text"] != said(60)
        assert said(60).startswith(answer["text"]), "nothing was doubled or lost before"
    site.wait_until_idle()
    site.wait("two gateways again", 90, site.has_two_gateways)

    async def again() -> Counter[int]:
        async with site.client() as client:
            return Counter([(await complete(client, num_tokens=1)).status_code for _ in range(10)])

    assert asyncio.run(again()) == {200: 10}


def test_a_worker_that_leaves_hands_long_streams_over_in_time(site: Site) -> None:
    """It may take 3 s for what would take 8: a tenth of the 30 s that a worker has for minutes."""
    num_tokens = 8000 // SLOW_MS

    async def run() -> list[dict[str, Any]]:
        slow = {"x-polypath-require": "pool=slow"}
        async with site.client() as client:
            tasks = [
                asyncio.create_task(stream(client, num_tokens, headers=slow)) for _ in range(10)
            ]
            await asyncio.sleep(1.5)
            await asyncio.to_thread(site.deploy, 1)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert [answer["text"] for answer in answers] == [said(num_tokens)] * 10
    assert all(answer["is_whole"] for answer in answers)
    moved = [change for answer in answers for change in answer["polypath"].get("resumed", ())]
    print(f"{len(moved)} of 10 streams were handed over: {[each['position'] for each in moved]}")
    assert moved
    assert {change["because"] for change in moved} == {"it was drained"}
    site.wait("two workers", 30, lambda: len(site.workers()) == 2)
    site.wait_until_idle()
