"""Twenty workers killed under 32 streams of the real engine: no stream breaks, no token differs.

Three workers on three nodes; one is killed as soon as two others live, so that resumed answers are
killed again before the replacements have come. Each answer is compared with the undisturbed one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polypath.tests.ray.labelled_cluster import MARKS, LabelledCluster, labelled_cluster
from polypath.tests.ray.running_server import RunningServer, serving_within
from polypath.tests.ray.test_failover import wait_for_workers, wait_until_idle, workers
from polypath.tests.ray.test_named_cluster import name

pytestmark = [pytest.mark.ray, pytest.mark.slow]

START_LIMIT_S = 300.0
NUM_STREAMS, NUM_KILLS, NUM_TOKENS = 32, 20, 300
KILLS_LIMIT_S = 400.0
NODES = [{"num_cpus": 1, "labels": {"zone": zone}} for zone in "abc"]
FILE = """\
address: {address}
port: 0
api: {{max_resumes: 30, stranded_s: 60.0}}
models:
  - model: {model}
    name: tiny
    engine: {{max_num_seqs: 24, num_threads: 1, calibration: false}}
    pools:
      - {{name: a, num_cpus: 0.5, label_selector: {{zone: a}}}}
      - {{name: b, num_cpus: 0.5, label_selector: {{zone: b}}}}
      - {{name: c, num_cpus: 0.5, label_selector: {{zone: c}}}}
"""


def only(text: str) -> dict[str, float]:
    """A logit bias that leaves the bytes of this text alone, half characters and all."""
    return {str(4 + byte): 60.0 for byte in set(text.encode())}


BODIES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 12, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 13, "n": 2},
    {"temperature": 1.0, "seed": 14, "logprobs": 2, "repetition_penalty": 1.3},
    {"temperature": 2.0, "seed": 15, "logit_bias": only("😀")},
    {"temperature": 1.0, "seed": 16, "logit_bias": only("漢é")},
    {"temperature": 1.0, "seed": 17, "stop": "to be found"},
]


@dataclass(slots=True)
class Streams:
    """32 clients that ask the same again and again until they are told to stop."""

    server: RunningServer
    bodies: list[dict[str, Any]]
    is_over: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def run(self, number: int) -> None:
        while not self.is_over.is_set():
            self.answers.append((number, stream(self.server, self.bodies[number])))


def stream(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed answer: texts and log-probabilities by choice, finish reasons, usage."""
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    ends: dict[int, str] = {}
    last: dict[str, Any] = {}
    url = f"{server.url}/v1/completions"
    with (
        httpx.Client(timeout=180, trust_env=False, verify=False) as client,
        client.stream("POST", url, json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        raw = b"".join(response.iter_bytes())
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    for event in raw.split(b"\n\n")[:-2]:
        if event.startswith(b":"):
            continue  # it waited, and the stream was kept open
        last = json.loads(event.removeprefix(b"data: "))
        for choice in last["choices"]:
            index = choice["index"]
            assert index not in ends, "nothing comes after the end"
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["logprobs"]:
                logprobs.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
    usage = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    said = {"texts": texts, "logprobs": logprobs, "ends": ends, "usage": usage}
    return {"said": said, "polypath": last["polypath"]}


def bodies(server: RunningServer) -> list[dict[str, Any]]:
    """What each client asks. Stop strings are pieces of what the answer would have become."""
    found = []
    for number in range(NUM_STREAMS):
        body = BODIES[number % len(BODIES)] | {
            "model": "tiny",
            "prompt": f"Number {number} speaks",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if body.pop("stop", None):
            text = stream(server, body)["said"]["texts"][0]
            body["stop"] = late_piece(text)
        found.append(body)
    return found


def late_piece(text: str) -> str:
    """Two characters that come in the last half of a text and not before."""
    for start in range(len(text) // 2, len(text) - 2):
        piece = text[start : start + 2]
        if piece.isascii() and text.index(piece) == start:
            return piece
    raise AssertionError(f"no piece of its own in {text!r}")


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def cluster(no_server: None, marks: Path) -> Iterator[LabelledCluster]:
    with labelled_cluster(NODES, **{MARKS: str(marks)}) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(
    cluster: LabelledCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Three workers, one a node, that a file can have killed at a stated moment."""
    program = (sys.executable, "-m", "polypath.tests.ray.own_replicas", "DyingReplica")
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(FILE.format(address=cluster.address, model=tiny_model))
    arguments = ["--config", str(path)]
    with serving_within(START_LIMIT_S, arguments, cluster.environment, program) as server:
        wait_for_workers(server, 3)
        yield server


@dataclass(frozen=True, slots=True)
class Expected:
    """Each client's request, and its answer when nothing disturbs it."""

    bodies: list[dict[str, Any]]
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def expected(fleet: RunningServer) -> Expected:
    asked = bodies(fleet)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(lambda body: stream(fleet, body), asked))
    assert not any("resumed" in answer["polypath"] for answer in answers)
    texts = [text for answer in answers for text in answer["said"]["texts"].values()]
    for piece in ("é", "\ufffd"):
        assert any(piece in text for text in texts), f"{piece} is among what is compared"
    assert any(char > "\uffff" for text in texts for char in text), "and emoji are"
    ends = [end for answer in answers for end in answer["said"]["ends"].values()]
    assert set(ends) == {"stop", "length"}
    return Expected(asked, [answer["said"] for answer in answers])


def alive(server: RunningServer) -> list[dict[str, Any]]:
    return [worker for worker in workers(server) if worker["stats"] is not None]


def kill_many(server: RunningServer, killed: list[int]) -> None:
    """The busiest, again and again, whenever another one lives: most of what it has was resumed."""
    deadline = time.monotonic() + KILLS_LIMIT_S
    while len(killed) < NUM_KILLS:
        assert time.monotonic() < deadline, f"only {len(killed)} were killed"
        time.sleep(0.3)
        there = [worker for worker in alive(server) if worker["pid"] not in killed]
        busiest = max(there, key=lambda worker: worker["in_flight"], default=None)
        if len(there) < 2 or busiest is None or not busiest["in_flight"]:
            continue
        os.kill(busiest["pid"], signal.SIGKILL)
        killed.append(busiest["pid"])


def test_twenty_kills_under_32_streams_change_no_token(
    fleet: RunningServer, expected: Expected
) -> None:
    streams, killed = Streams(fleet, expected.bodies), []
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(streams.run, number) for number in range(NUM_STREAMS)]
        try:
            kill_many(fleet, killed)
        finally:
            streams.is_over.set()
        for each in running:
            each.result()
    assert len(set(killed)) == NUM_KILLS
    for number, answer in streams.answers:
        assert answer["said"] == expected.answers[number], f"{number}: {answer['polypath']}"
    changes = [answer["polypath"].get("resumed", []) for _, answer in streams.answers]
    twice = sum(len(each) > 1 for each in changes)
    at_start = sum(change["position"] == 0 for each in changes for change in each)
    print(
        f"{len(changes)} answers, {sum(map(bool, changes))} of them resumed, {twice} of them more "
        f"than once; {at_start} changes before the first token"
    )
    assert sum(map(bool, changes)) > NUM_KILLS and twice > 0
    assert all(change["changed"] == {} for each in changes for change in each)
    wait_for_workers(fleet, 3)
    wait_until_idle(fleet)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_kill_between_the_first_step_and_the_first_chunk(
    fleet: RunningServer, expected: Expected, marks: Path, number: int
) -> None:
    """The step was computed and nothing of it has left the worker; the next one dies so as well."""
    mark = marks / "first-chunk"
    mark.touch()
    answer = stream(fleet, expected.bodies[number])
    assert not mark.exists(), "a worker took it, and died"
    assert answer["said"] == expected.answers[number]
    changes = answer["polypath"]["resumed"]
    assert [change["position"] for change in changes] == [0] * len(changes) and changes
    wait_for_workers(fleet, 3)
    wait_until_idle(fleet)


def test_a_killed_gateway_ends_its_streams_and_comes_back_at_its_address(
    cluster: LabelledCluster, fleet: RunningServer, expected: Expected
) -> None:
    """`polypath serve` has one gateway, which listens itself."""
    family = psutil.Process(cluster.pid).children(recursive=True)
    (gateway,) = [each for each in family if "ServeReplica:polypath:gateway" in name(each)]

    def until_broken(body: dict[str, Any]) -> None:
        while True:
            try:
                stream(fleet, body)
            except (httpx.HTTPError, AssertionError):  # the connection broke; no [DONE]
                return

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(until_broken, body) for body in expected.bodies]
        deadline = time.monotonic() + KILLS_LIMIT_S
        while sum(worker["in_flight"] for worker in workers(fleet)) < NUM_STREAMS // 2:
            assert time.monotonic() < deadline, "the clients' streams never ran together"
        gateway.kill()
        began = time.monotonic()
        for each in running:
            each.result()
    print(f"every client had its error {time.monotonic() - began:.1f} s after the kill")
    deadline = time.monotonic() + 90
    while not is_answering(fleet):
        assert time.monotonic() < deadline, "the gateway did not come back"
        time.sleep(0.3)
    print(f"the gateway was back {time.monotonic() - began:.1f} s after the kill")
    wait_for_workers(fleet, 3)
    wait_until_idle(fleet)
    assert stream(fleet, expected.bodies[0])["said"] == expected.answers[0]


def is_answering(server: RunningServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
