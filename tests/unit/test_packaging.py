"""What is installed: the list of packages is the tree's, and a wheel holds those only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("kernels", "runtime", "actors", "deployments")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTENSIONS = PROJECT["tool"]["setuptools"]["ext-modules"]

NOT_INSTALLED = {".cpp", ".h", ".md"}  # sources of extension modules, and reading matter
BUILT = ".so"


def product_files() -> list[str]:
    """Every file below the layers that an installation needs, as a path inside the package."""
    found = (path for layer in LAYERS for path in (ROOT / layer).rglob("*") if path.is_file())
    kept = (path for path in found if "__pycache__" not in path.parts)
    paths = (path for path in kept if path.suffix not in {*NOT_INSTALLED, BUILT})
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


@pytest.fixture(scope="session")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """File names in a wheel built from a copy of the tree, so that no old build/ folder gets in;
    compiled without optimization, which takes less than half the time.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.so")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--disable-pip-version-check", "--no-index", "--wheel-dir", str(folder), str(source)]
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "CXX": str(compiler)}
    run = subprocess.run(pip, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    (wheel,) = folder.glob("polypath-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def pins(name: str) -> dict[str, str]:
    """Package -> version of a constraints file."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = dict(line.split("==") for line in lines if line)
    return {canonicalize_name(package): version for package, version in found.items()}


def test_the_list_of_packages_equals_the_folders() -> None:
    folders = {Path(name).parent.as_posix().replace("/", ".") for name in product_files()}
    expected = {"polypath", *(f"polypath.{folder}" for folder in folders)}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("changed", ["kernels/cpu/linear.cpp", "kernels/cpu/team.h"])
def test_a_changed_kernel_is_built_before_it_serves(tmp_path: Path, changed: str) -> None:
    """Old builds went on under new Python after a pull."""
    for pattern in ("Makefile", "pyproject.toml", "constraints-*.txt", "kernels/cpu/*.*"):
        for path in ROOT.glob(pattern):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
            if path.name == "Makefile":
                shutil.copyfile(path, target)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()

    def installs(*arguments: str) -> bool:
        make = ["make", "--dry-run", *arguments, "serve"]
        done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True)
        return "--editable" in done.stdout

    assert not installs()
    assert installs(f"--what-if={changed}")


@pytest.mark.slow
def test_the_wheel_holds_every_product_file(wheel_names: list[str]) -> None:
    assert not {f"polypath/{name}" for name in product_files()} - set(wheel_names)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="all builds need g++ and an x86-64 machine",
)
def test_the_wheel_holds_every_build_of_the_kernels(wheel_names: list[str]) -> None:
    built = sorted(Path(name).name.split(".")[0] for name in wheel_names if name.endswith(BUILT))
    wanted = sorted(each["name"].rpartition(".")[2] for each in EXTENSIONS)
    assert built == wanted


@pytest.mark.slow
def test_the_wheel_holds_nothing_else(wheel_names: list[str]) -> None:
    product = {"polypath/__init__.py", *(f"polypath/{name}" for name in product_files())}
    rest = [name for name in wheel_names if name not in product and not name.endswith(BUILT)]
    assert all(name.startswith("polypath-") and ".dist-info/" in name for name in rest), rest


def test_only_python_3_11_and_3_12_are_accepted() -> None:
    accepts = SpecifierSet(PROJECT["project"]["requires-python"])
    answers = {f"3.{minor}": f"3.{minor}.5" in accepts for minor in range(9, 16)}
    assert [version for version, fits in answers.items() if fits] == ["3.11", "3.12"]


@pytest.mark.parametrize(
    ("constraints", "extras"),
    [("constraints-cpu.txt", ["dev"]), ("constraints-gpu.txt", ["dev", "gpu"])],
)
def test_every_direct_requirement_is_pinned_within_its_range(
    constraints: str, extras: list[str]
) -> None:
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    pinned = pins(constraints)
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{constraints} does not pin {requirement.name}"
        assert version in requirement.specifier, f"{constraints}: {requirement.name}=={version}"
