"""The bench's side of the peer protocol, against a fake peer."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from polypath.deployments.bench_peers import Peer, peer_pythons
from polypath.runtime.bench import Workload
from polypath.runtime.errors import ConfigurationError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
POINTS = [
    Workload(batch=1, prompt_tokens=8, new_tokens=1),
    Workload(batch=2, prompt_tokens=4, new_tokens=3),
]

FAKE = """
import sys
sys.path.insert(0, {benchmarks!r})
from peer import Run, answer, read_task

task = read_task()

def measure(workload, settings, prompts):
    assert all(0 <= i < task.vocab for row in prompts for i in row)
    new = workload.new_tokens - {short}
    tokens = sum(map(len, prompts))
    rows = workload.batch
    seconds = settings["seconds"]
    return Run(tokens, rows * new, 0.0, 1.0, 1.0 + seconds, rows * (new - 1))

answer(task, "fake 1.0 " + task.model, lambda w: [{{"seconds": 4.0}}, {{"seconds": 2.0}}], measure)
"""

SLOW = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from peer import read_task

task = read_task()
open(os.path.join(task.model, "pid"), "w").write(str(os.getpid()))
time.sleep(120)
"""

KILLED = """
import sys
from pathlib import Path
from polypath.deployments.bench_peers import Peer

Peer("slow", folder=Path(sys.argv[1])).run(sys.argv[1], 1, [], 1, vocab=9)
"""


def fake(folder: Path, short: int = 0, name: str = "fake") -> Path:
    """A folder of adapters with one that pretends."""
    text = FAKE.format(benchmarks=str(BENCHMARKS), short=short)
    (folder / f"{name}_peer.py").write_text(text)
    return folder


def run(peer: Peer, **options: bool) -> None:
    peer.run("model.gguf", 2, POINTS, 3, vocab=50, **options)


def test_rounds_add_up_and_keep_the_settings_that_were_fastest(tmp_path: Path) -> None:
    peer = Peer("fake", folder=fake(tmp_path))
    run(peer)
    assert peer.version == "fake 1.0 model.gguf"
    assert peer.settings is not None and peer.settings[1] == {"seconds": 2.0}
    peer.settings[1] = {"seconds": 8.0}
    run(peer)
    prefill, decode = peer.measurements()
    assert [m.prefill_tokens_s for m in prefill] == [8.0] * 6
    assert [m.decode_tokens_s for m in decode] == [2.0] * 3 + [0.5] * 3
    assert decode[0].step_ms == 1000.0


def test_busy_rounds_are_kept_apart(tmp_path: Path) -> None:
    peer = Peer("fake", folder=fake(tmp_path))
    run(peer)
    run(peer, is_busy=True)
    assert len(peer.measurements()[0]) == len(peer.measurements(is_busy=True)[0]) == 3


def test_a_peer_that_did_less_is_refused(tmp_path: Path) -> None:
    peer = Peer("fake", folder=fake(tmp_path, short=1))
    with pytest.raises(ConfigurationError, match="8 prompt tokens and 0 new ones where 8 and 1"):
        run(peer)


def test_a_peer_ends_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow_peer.py").write_text(SLOW.format(benchmarks=str(BENCHMARKS)))
    bench = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    pid_file = tmp_path / "pid"
    try:
        _wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    finally:
        bench.kill()
        bench.communicate()
    pid = int(pid_file.read_text())
    _wait_for(lambda: not psutil.pid_exists(pid))


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def test_a_model_of_its_own_goes_to_the_peer_and_into_its_name(tmp_path: Path) -> None:
    peer = Peer("fake=/models/small-q4_0.gguf", folder=fake(tmp_path))
    run(peer)
    assert peer.name == "fake small-q4_0"
    assert peer.version == "fake 1.0 /models/small-q4_0.gguf"


def test_a_dot_in_a_name_is_left_out_of_the_file(tmp_path: Path) -> None:
    assert Peer("llama.cpp", folder=fake(tmp_path, name="llamacpp")).name == "llama.cpp"
    with pytest.raises(ConfigurationError, match=r"this checkout has llama\.cpp"):
        Peer("nothing", folder=tmp_path)


def test_the_last_line_of_a_failing_peer_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken_peer.py").write_text("raise SystemExit('no such file: x.gguf')")
    peer = Peer("broken", folder=tmp_path)
    with pytest.raises(ConfigurationError, match="broken failed: no such file"):
        run(peer)


def test_a_python_that_is_none_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--peer-python /nowhere/python is no file"):
        Peer("fake", python="/nowhere/python", folder=fake(tmp_path))


def test_pythons_are_given_for_all_or_for_one() -> None:
    assert peer_pythons(["/a/python", "openvino=/b/python"]) == {
        "": "/a/python",
        "openvino": "/b/python",
    }


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "ctranslate2"])
def test_a_peer_that_is_not_installed_says_how_to_install_it(name: str, tmp_path: Path) -> None:
    """In an interpreter without site-packages none is."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    peer = Peer(name, python=str(bare))
    with pytest.raises(ConfigurationError, match=r"does not load in .*pip install .*--peer-python"):
        run(peer)
