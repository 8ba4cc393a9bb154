"""Many streams share steps, and a long prompt does not silence those that run: the real model over
HTTP.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from polypath.tests.ray.running_server import RunningServer, serving

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_STREAMS, NUM_TOKENS = 32, 24
LONG_PROMPT = 4000  # tokens
DOG = 2767  # " dog", in SmolLM2's vocabulary


@pytest.fixture(scope="module")
def smol(no_server: None) -> Iterator[RunningServer]:
    """`polypath serve` with the default model; as many at once as it has room for, however fast a
    busy machine lets it seem.
    """
    with serving(["--port", "0", "--no-calibration"]) as running:
        yield running


def stream(server: RunningServer, prompt: str | list[int], num_tokens: int) -> list[float]:
    """Seconds at which the pieces of one answer came."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    times: list[float] = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=300, trust_env=False
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            assert not line.startswith("event: error"), line
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return times


def test_concurrent_streams_share_steps(smol: RunningServer) -> None:
    stream(smol, "Warm up", 4)
    began = time.monotonic()
    for number in range(NUM_STREAMS // 4):
        stream(smol, f"Tell me about number {number}.", NUM_TOKENS)
    one_by_one_s = (time.monotonic() - began) * 4

    most_running, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most_running
        while not is_done.wait(0.05):
            most_running = max(most_running, smol.worker()["stats"]["running"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    prompts = [f"Tell me about number {number}." for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(lambda prompt: stream(smol, prompt, NUM_TOKENS), prompts))
    together_s = time.monotonic() - began
    is_done.set()
    watcher.join()
    print(f"one by one {one_by_one_s:.1f} s, together {together_s:.1f} s, {most_running} at once")
    assert most_running >= 16
    assert together_s <= one_by_one_s * 0.75  # how much faster is for the bench to say


def test_a_long_prompt_leaves_gaps_of_less_than_two_steps(smol: RunningServer) -> None:
    budget = smol.worker()["plan"]["max_num_batched_tokens"]
    began = time.monotonic()
    stream(smol, [DOG] * LONG_PROMPT, 1)
    step_s = (time.monotonic() - began) / math.ceil(LONG_PROMPT / budget)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, smol, "Once upon a time", 150)
        time.sleep(1)
        # Another token than before, or the prefix cache would leave nothing to prefill.
        long = pool.submit(stream, smol, [DOG + 1] * LONG_PROMPT, 1)
        times = running.result()
        long.result()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    print(f"a budgeted step takes {step_s:.2f} s, the longest gap was {max(gaps):.2f} s")
    assert max(gaps) < 2 * step_s
