"""One pool awake and one asleep on a Ray of their own, broken while requests wait for the one that
sleeps: each ends in a clear answer, soon.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polypath.tests.ray.running_server import RunningServer, serving_within

pytestmark = [pytest.mark.ray, pytest.mark.slow]

START_LIMIT_S, WAKE_LIMIT_S, BACK_LIMIT_S = 240.0, 120.0, 60.0
FILE = """\
port: 0
models:
  - model: {model}
    name: tiny
    engine: {{max_num_seqs: 1, max_waiting: 3, num_threads: 1, calibration: false}}
    scaling: {{target_queue_s: 1, scale_down_delay_s: 3}}
    pools:
      - {{name: short, num_cpus: 0.4, engine: {{max_model_len: 256}}}}
      - name: long
        num_cpus: 0.4
        engine: {{max_model_len: 2048}}
        min_workers: 0
        max_workers: 1
        price: 5
        cold_start_s: 60
"""
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 300}


class Site:
    """The server, and what one asks there."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self._threads = ThreadPoolExecutor(16)

    def ask(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        url = f"{self.server.url}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=WAKE_LIMIT_S, trust_env=False)

    def later(self, body: dict[str, Any]) -> Future[httpx.Response]:
        return self._threads.submit(self.ask, body)

    def pools(self) -> list[str]:
        return sorted(worker["pool"] for worker in self.server.get("/v1/paths")["data"])

    def kill(self, title: str) -> None:
        """As the system does when memory is short."""
        for process in self.processes(title):
            process.kill()

    def lose(self, pool: str) -> None:
        """Its only worker, so that it has a cold start before it; sooner than by waiting."""
        others = [name for name in self.pools() if name != pool]
        self.kill(f"tiny.{pool}")
        self.wait(lambda: self.pools() == others, BACK_LIMIT_S)

    def processes(self, title: str) -> list[psutil.Process]:
        title = f"ServeReplica:polypath:{title}"
        family = self.server.look()
        return [process for process in family if title in " ".join(process.cmdline())]

    def wait(self, is_so: Callable[[], object], limit_s: float) -> float:
        began_s = time.monotonic()
        while True:
            try:
                if is_so():
                    return time.monotonic() - began_s
            except (httpx.HTTPError, psutil.Error):
                pass  # nobody listens for a moment
            assert time.monotonic() - began_s < limit_s, self.server.output
            time.sleep(0.2)


@pytest.fixture(scope="module")
def site(
    no_server: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(FILE.format(model=tiny_model))
    with serving_within(START_LIMIT_S, ["--config", str(path)], {}) as server:
        yield Site(server)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_deadline_shorter_than_the_cold_start_is_a_504(site: Site, is_stream: bool) -> None:
    began_s = time.monotonic()
    answer = site.ask(LONG | {"stream": is_stream}, **{"X-Request-Timeout": "1"})
    assert answer.status_code == 504 and time.monotonic() - began_s < 5
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_gateway_killed_under_those_who_wait_is_back_and_the_pool_is_woken(site: Site) -> None:
    waiting = [site.later(LONG), site.later(LONG | {"stream": True})]
    time.sleep(1)
    began_s = time.monotonic()
    site.kill("gateway")
    for each in waiting:
        assert isinstance(each.exception(timeout=10), httpx.TransportError)
    assert time.monotonic() - began_s < 5, "clients hear of it at once"
    site.wait(lambda: site.server.get("/health")["status"] == "ok", BACK_LIMIT_S)
    assert site.ask(LONG).json()["usage"]["completion_tokens"] == 300
    assert site.ask(SHORT).status_code == 200


def test_one_that_starts_while_a_pool_sleeps_knows_what_its_worker_was(site: Site) -> None:
    site.wait(lambda: site.pools() == ["short"], WAKE_LIMIT_S)
    site.kill("gateway")
    time.sleep(1)
    site.wait(lambda: site.pools() == ["short"], BACK_LIMIT_S)
    answer = site.ask(LONG, **{"x-polypath-require": "runner=no_such"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_capable_worker"
    assert "pool long, without a worker now: runner is " in answer.text


def test_a_worker_killed_in_its_cold_start_is_followed_by_another(site: Site) -> None:
    waiting = site.later(LONG)
    site.wait(lambda: site.processes("tiny.long"), WAKE_LIMIT_S)
    site.kill("tiny.long")
    assert waiting.result().json()["usage"]["completion_tokens"] == 300


def test_a_full_queue_of_the_sleeping_pool_is_a_429_and_no_other_pool_is_refused(
    site: Site,
) -> None:
    site.lose("long")
    answers = [site.later(LONG) for _ in range(8)]
    site.wait(lambda: sum(each.done() for each in answers) >= 3, 30)
    assert site.ask(SHORT).status_code == 200
    found = [each.result() for each in answers]
    refused = [answer for answer in found if answer.status_code != 200]
    assert {answer.status_code for answer in refused} == {429} and len(refused) < 8
    assert all("the limit is 3" in a.text and int(a.headers["retry-after"]) for a in refused)


def test_ctrl_c_in_a_cold_start_tells_those_who_wait_and_leaves_nothing(site: Site) -> None:
    site.lose("long")
    waiting = [site.later(LONG), site.later(LONG | {"stream": True})]
    time.sleep(1)
    began_s = time.monotonic()
    stopping = threading.Thread(target=site.server.stop, args=(signal.SIGINT,))
    stopping.start()
    for each in waiting:
        answer = each.result(timeout=10)
        assert answer.status_code == 503 and "The server is stopping" in answer.text
    stopping.join()
    assert site.server.process.returncode == 0 and time.monotonic() - began_s < 15
    assert not site.server.left_over()
