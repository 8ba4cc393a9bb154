"""Layers of the product: no import runs upward, and the engine needs no serving package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("kernels", "runtime", "actors", "deployments")  # each may import itself and what is left
SERVING_PACKAGES = ("ray", "fastapi", "starlette", "uvicorn", "pydantic", "gguf", "transformers")


def product_files(*layers: str) -> list[Path]:
    """The Python files of these layers, relative to the root."""
    found = (path for layer in layers for path in (ROOT / layer).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found)


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a product file imports, wherever in the file; ours as `polypath.…`."""
    package = ["polypath", *path.parts[:-1]]
    for node in ast.walk(ast.parse((ROOT / path).read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            assert base, f"{path}:{node.lineno} imports from above the package"
            if node.module:
                yield ".".join([*base, node.module])
            else:
                yield from (".".join([*base, alias.name]) for alias in node.names)


def module_name(path: Path) -> str:
    return ".".join(["polypath", *path.with_suffix("").parts])


@pytest.mark.parametrize("path", product_files(*LAYERS), ids=str)
def test_no_import_runs_upward(path: Path) -> None:
    allowed = LAYERS[: LAYERS.index(path.parts[0]) + 1]
    ours = [name for name in imported_modules(path) if name.split(".")[0] == "polypath"]
    upward = [name for name in ours if name != "polypath" and name.split(".")[1] not in allowed]
    assert not upward, f"{path} may import from {', '.join(allowed)} only"


@pytest.mark.parametrize("path", product_files(*LAYERS), ids=str)
def test_product_code_imports_its_own_code_relatively(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text(), str(path))
    names = [n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
    names += [
        node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0
    ]
    own = ("polypath", "tests", *LAYERS)
    assert not [name for name in names if name.split(".")[0] in own]


def test_only_the_root_has_an_init_file() -> None:
    folders = [ROOT / layer for layer in (*LAYERS, "tests")]
    inner = [path for folder in folders for path in folder.rglob("__init__.py")]
    assert not inner, (
        "a folder's __init__.py would shadow packages such as Hugging Face's `kernels`"
    )
    assert (ROOT / "__init__.py").is_file()


def test_the_engines_half_imports_without_the_serving_packages() -> None:
    files = product_files("kernels", "runtime")
    if find_spec("triton") is None:  # where nothing but planning knows of our Triton kernels
        files = [path for path in files if "triton" not in (path.parts[-2], path.stem)]
    modules = [module_name(path) for path in files]
    script = f"""
import importlib, sys
for name in {SERVING_PACKAGES!r}:
    sys.modules[name] = None  # makes `import name` raise ModuleNotFoundError
for name in {modules!r}:
    importlib.import_module(name)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
