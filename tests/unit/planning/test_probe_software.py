"""Packages that import, fail or crash, and compilers that work or do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from polypath.runtime.planning import probe as probing
from polypath.runtime.planning import probe_software
from polypath.runtime.planning.hardware import Driver, Package
from polypath.runtime.planning.probe_software import (
    OPTIONAL_PACKAGES,
    OptionalPackage,
    probe_compiler,
    probe_nvcc,
    probe_packages,
    probe_torch,
)

MODULES = {
    "pp_good": "print('noise on import')\n",
    "pp_bad": "raise ImportError('libcuda.so.1 is missing')\n",
    "pp_exits": "raise SystemExit(3)\n",
    "pp_crashes": "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n",
    "pp_untried": "raise AssertionError('nobody may import this')\n",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installed distributions of the modules above, on the path of this and child interpreters."""
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def package(name: str, tried: bool = True) -> OptionalPackage:
    return OptionalPackage(name, name, (name,), tried)


def test_each_package_gets_its_own_reason(site) -> None:
    names = ["pp_good", "pp_bad", "pp_crashes", "pp_exits", "pp_missing"]
    found = probe_packages([*map(package, names), package("pp_untried", tried=False)])
    assert found["pp_good"].imports is True and found["pp_good"].version == "1.5"
    assert found["pp_bad"].imports is False
    assert found["pp_bad"].problem == "ImportError: libcuda.so.1 is missing"
    assert found["pp_crashes"].imports is False and "status -4" in str(found["pp_crashes"].problem)
    assert found["pp_exits"].imports is False and "SystemExit" in str(found["pp_exits"].problem)
    assert found["pp_missing"].version is None and found["pp_missing"].imports is None
    assert found["pp_untried"].version == "1.5" and found["pp_untried"].imports is None


def test_an_import_that_hangs_is_given_up(site, monkeypatch) -> None:
    (site / "pp_good.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(probe_software, "IMPORT_TIMEOUT_S", 1.0)
    found = probe_packages([package("pp_good"), package("pp_bad")])
    assert found["pp_good"].imports is False and "1 s" in str(found["pp_good"].problem)
    assert found["pp_bad"].imports is False


def test_an_interpreter_that_does_not_start_is_a_reason(site) -> None:
    found = probe_packages([package("pp_good")], python="/nonexistent/python")
    assert "does not start" in str(found["pp_good"].problem)


def test_torch_is_described_without_importing_it() -> None:
    import subprocess

    code = (
        "import sys\nfrom polypath.runtime.planning.probe_software import probe_torch\n"
        "print(probe_torch().version, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, imported = done.stdout.split()
    assert version == probe_torch().version and imported == "False"


def compiler_at(folder: Path, name: str, body: str) -> dict[str, str]:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return {"PATH": str(folder)}


def headers_at(folder: Path) -> str:
    (folder / "Python.h").write_text("")
    return str(folder)


def test_the_first_compiler_that_works_is_taken(tmp_path) -> None:
    compiler_at(tmp_path, "g++", "exit 1")
    environ = compiler_at(tmp_path, "clang++", "echo clang 18; echo more")
    found = probe_compiler(environ, headers_at(tmp_path))
    assert found.version == "clang 18" and found.can_build


def test_without_a_compiler_the_problem_says_so(tmp_path) -> None:
    found = probe_compiler({"PATH": str(tmp_path)}, headers_at(tmp_path))
    assert found.path is None and not found.can_build and "no C++ compiler" in str(found.problem)


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_a_broken_named_compiler_is_not_replaced(tmp_path, variable) -> None:
    environ = compiler_at(tmp_path, "g++", "echo g++ 12")
    environ |= compiler_at(tmp_path, "false", "exit 1") | {variable: f"{tmp_path}/false"}
    found = probe_compiler(environ, headers_at(tmp_path))
    assert not found.can_build
    assert str(found.problem).startswith(f"{variable}={tmp_path}/false: --version exits with 1")


def test_a_named_compiler_may_be_a_command_of_words(tmp_path) -> None:
    environ = compiler_at(tmp_path, "wrap", 'test "$1" = g++ && echo wrapped') | {"CXX": "wrap g++"}
    assert probe_compiler(environ, headers_at(tmp_path)).version == "wrapped"


def test_a_compiler_that_hangs_is_a_problem(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(probe_software, "COMPILER_TIMEOUT_S", 0.2)
    environ = compiler_at(tmp_path, "g++", "exec sleep 30") | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}"
    }
    environ["CXX"] = f"{tmp_path}/g++"
    found = probe_compiler(environ, headers_at(tmp_path))
    assert "did not answer" in str(found.problem)


def test_without_python_headers_nothing_can_be_built(tmp_path) -> None:
    environ = compiler_at(tmp_path, "g++", "echo g++ 12")
    found = probe_compiler(environ, str(tmp_path))
    assert found.problem is None and not found.python_headers and not found.can_build


def test_nvcc_is_looked_for_in_path_and_in_cuda_home(tmp_path) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    assert probe_nvcc({"PATH": str(tmp_path / "bin")}) == "13.0"
    assert probe_nvcc({"PATH": "", "CUDA_HOME": str(tmp_path)}) == "13.0"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    assert probe_nvcc({"PATH": "", "CUDA_HOME": str(tmp_path)}) in (None, probe_nvcc({"PATH": ""}))


def test_a_node_without_cards_imports_no_package_that_serves_cards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[OptionalPackage] = []

    def note(packages: Sequence[OptionalPackage]) -> dict[str, Package]:
        asked.extend(packages)
        return {}

    monkeypatch.setattr(probing, "probe_packages", note)
    monkeypatch.setattr(probing, "probe_gpus", lambda *arguments: (Driver(), ()))
    assert probing.probe().packages == {}
    assert [package.name for package in asked] == [p.name for p in OPTIONAL_PACKAGES]
    assert not any(package.tried for package in asked)
