"""The README's quickstart, line by line, as a newcomer would type it."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import DefaultHttpxClient, OpenAI

from polypath.tests.driving import planned_path
from polypath.tests.ray.running_server import RunningServer, inherited

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
README_LIMIT_S = 60
# The test stands in a finished environment; without this, make might install again.
MAKE = ["make", "--assume-old=.venv/.installed"]


def quickstart_blocks() -> list[str]:
    """The fenced shell blocks of the section Quickstart."""
    text = (ROOT / "README.md").read_text()
    section = text.split("## Quickstart", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def shell(commands: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run lines as one script that stops at the first failure."""
    return subprocess.run(
        ["bash", "-ec", commands],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=README_LIMIT_S,
    )


@pytest.fixture(scope="module")
def quickstart(no_server: None) -> Iterator[RunningServer]:
    """`make serve`, running."""
    if Path(sys.executable).parent != ROOT / ".venv" / "bin":
        pytest.skip("the quickstart's lines use .venv/bin, and these tests run elsewhere")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("something listens on port 8000, which the quickstart uses")
    process = subprocess.Popen(
        [*MAKE, "serve"],
        cwd=ROOT,
        env=inherited(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    server = RunningServer(process)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop_group(signal.SIGINT)


def test_the_quickstart_starts_with_one_command() -> None:
    assert quickstart_blocks()[0].strip() == "make serve"


def test_it_becomes_ready_where_the_readme_says(quickstart: RunningServer) -> None:
    assert quickstart.url == "http://127.0.0.1:8000"
    assert len(quickstart.lines) <= 30, quickstart.output
    for stage in ("hardware", "decode", "weights", "KV pool", "self-check", "Ctrl-C stops it"):
        assert stage in quickstart.output


def test_the_lines_for_a_second_terminal_work(quickstart: RunningServer) -> None:
    block = quickstart_blocks()[1]
    if shutil.which("curl") is None:
        block = re.sub(r"^curl(.*\\\n)*.*\n", "", block, flags=re.MULTILINE)
    done = shell(block, stdin="Say hello.\n")
    assert done.returncode == 0, done.stderr
    assert planned_path() in done.stdout


def test_the_lines_that_need_no_server_work() -> None:
    done = shell(quickstart_blocks()[2])
    assert done.returncode == 0, done.stderr + done.stdout
    assert "torch_sdpa" in done.stdout


def test_the_real_model_answers_a_real_question(quickstart: RunningServer) -> None:
    with OpenAI(
        base_url=f"{quickstart.url}/v1",
        api_key="none",
        http_client=DefaultHttpxClient(trust_env=False),
    ) as client:
        stream = client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": "Is Paris the capital of France?"}],
            temperature=0,
            max_tokens=32,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Paris" in text
    quickstart.wait_until_idle()


def test_ctrl_c_stops_all_of_it(quickstart: RunningServer) -> None:
    """Last in this file: as a terminal does, the signal goes to make and all below it."""
    quickstart.stop_group(signal.SIGINT)
    assert quickstart.left_over() == []
