"""`polypath serve` refuses early what cannot work, and leaves nothing behind when it stops."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from polypath.tests.driving import planned_path
from polypath.tests.ray.running_server import RunningServer, run, serving, start

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_server")]


def test_a_taken_port_is_refused_before_anything_starts(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        code, output = run(["serve", str(tiny_model), "--port", str(port)])
    assert time.monotonic() - began < 6  # under 1 s on an idle machine
    assert code == 2
    assert output.startswith(f"error: 127.0.0.1:{port} is taken by")
    assert output.count("\n") == 1


def test_an_impossible_choice_ends_with_reasons_before_anything_starts(tiny_model: Path) -> None:
    code, output = run(
        ["serve", str(tiny_model), "--port", "0", "--attention-backend", "flashinfer"]
    )
    assert code == 2
    backend = planned_path().split("+")[1]
    assert f"Nearest choice that works: --attention-backend {backend}" in output
    assert "Traceback" not in output


def test_a_dead_cluster_is_said_in_one_sentence(tiny_model: Path) -> None:
    began = time.monotonic()
    code, output = run(["serve", str(tiny_model), "--port", "0"], RAY_ADDRESS="127.0.0.1:1")
    assert time.monotonic() - began < 15
    assert code == 2
    assert "RAY_ADDRESS names the Ray cluster 127.0.0.1:1, but nothing answers there" in output


@pytest.mark.slow
def test_no_running_cluster_for_auto_is_said_in_one_sentence(tiny_model: Path) -> None:
    began = time.monotonic()
    code, output = run(["serve", str(tiny_model), "--port", "0", "--address", "auto"])
    assert time.monotonic() - began < 15
    assert code == 2
    assert "could not reach the Ray cluster auto named by --address" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_worker_that_cannot_start_gives_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    data = bytearray(weights.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start_at = 8 + length + header["model.norm.weight"]["data_offsets"][0]
    data[start_at : start_at + 4] = b"\x00\x00\xc0\x7f"  # not a number
    weights.write_bytes(data)
    code, output = run(["serve", str(broken), "--port", "0"], timeout_s=120)
    assert code == 1
    assert output.count("error: ") == 1
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_folder(tiny_model: Path, number: signal.Signals) -> None:
    before = set(Path("/tmp").glob("polypath-*"))
    with serving([str(tiny_model), "--port", "0"]) as server:
        began = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - began < 10
        assert server.left_over() == []
    assert set(Path("/tmp").glob("polypath-*")) <= before


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.5, 3.0, 6.0, 9.0])
def test_a_signal_during_the_start_leaves_no_process(tiny_model: Path, after_s: float) -> None:
    server = RunningServer(start(["serve", str(tiny_model), "--port", "0"]))
    time.sleep(after_s)
    assert server.stop() in (0, 130)
    assert server.left_over() == []
    assert "Traceback" not in server.output


@pytest.mark.slow
def test_a_server_whose_ray_is_gone_says_so_and_ends(tiny_model: Path) -> None:
    with serving([str(tiny_model), "--port", "0"]) as server:
        (head,) = [each for each in server.look() if each.name() == "gcs_server"]
        head.kill()
        assert server.process.wait(20) == 1
        server.join()
        assert "error: Ray's process gcs_server has ended" in server.output
        assert "Traceback" not in server.output and server.left_over() == []


@pytest.mark.slow
def test_a_killed_server_takes_its_processes_with_it(tiny_model: Path) -> None:
    with serving([str(tiny_model), "--port", "0"]) as server:
        server.stop(signal.SIGKILL)
        assert server.left_over(grace_s=90) == []  # two agents of Ray take half a minute
