"""The Dockerfiles as far as they can be checked without Docker: instructions, what they copy, their
shell, and habits that make images small and not run as root.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ["Dockerfile.cpu", "Dockerfile.gpu"]
KNOWN = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "CMD", "ARG"}
Instruction = tuple[str, str]  # name, the rest in one line


@pytest.fixture(params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def read(name: str) -> list[Instruction]:
    """Instructions in order, continued lines joined, comments left out."""
    lines = [x for x in (ROOT / name).read_text().splitlines() if x and not x.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parts = (line.split(maxsplit=1) for line in joined.splitlines())
    return [(first, rest) for first, rest in parts]


def test_has_only_instructions_that_docker_knows_and_pinned_images(name: str) -> None:
    found = read(name)
    assert {first for first, _ in found} <= KNOWN
    images = [rest.split()[0] for first, rest in found if first == "FROM"]
    assert images and all(re.fullmatch(r"python:3\.1[12]-slim-\w+", image) for image in images)


def test_bash_can_read_every_command(name: str) -> None:
    for first, rest in read(name):
        if first == "RUN":
            done = subprocess.run(["sh", "-n", "-c", rest], capture_output=True, text=True)
            assert done.returncode == 0, (rest, done.stderr)


def test_copies_what_is_there_and_uses_what_it_copied(name: str) -> None:
    constraints = f"constraints-{name.rpartition('.')[2]}.txt"
    copied = [rest for first, rest in read(name) if first == "COPY" and "--from" not in rest]
    assert copied == [". .", f"{constraints} /opt/constraints.txt"]
    assert (ROOT / constraints).is_file()
    text = " ".join(rest for first, rest in read(name) if first == "RUN")
    others = set(re.findall(r"constraints-\w+\.txt", text)) - {constraints}
    assert not others
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "build", "dist"} <= set(ignored)


def test_leaves_no_caches_and_installs_no_more_than_asked(name: str) -> None:
    for first, rest in read(name):
        if first != "RUN":
            continue
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest
            assert rest.startswith("apt-get update ")
        for command in rest.split("&&"):
            if re.search(r"pip (install|wheel)", command):
                assert "--no-cache-dir" in command
                assert "--no-deps" in command or " -c " in command, "exact versions"


def test_does_not_run_as_root(name: str) -> None:
    users = [rest for first, rest in read(name) if first == "USER"]
    assert users == ["ray"]
    assert "useradd" in " ".join(rest for first, rest in read(name) if first == "RUN")


def test_the_gpu_image_has_the_gpu_packages_and_a_compiler() -> None:
    last = [i for i, (first, _) in enumerate(read("Dockerfile.gpu")) if first == "FROM"][-1]
    text = " ".join(rest for _, rest in read("Dockerfile.gpu")[last:])
    assert "polypath[gpu]" in text and "g++" in text
