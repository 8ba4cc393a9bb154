"""Which torch, optional packages and C++ compiler are here, found without importing them here.

Versions come from package metadata and torch's build from its version.py. Importing is tried only
for packages marked `tried` below (those that a candidate needs and that are cheap), and in a child
process, since an import can die of an illegal instruction. For the rest `imports` stays None:
torch, ray, vllm and transformers take seconds each.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from .hardware import Compiler, Package, Torch

IMPORT_TIMEOUT_S = 60.0
COMPILER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """How capability records spell it, its module, and the distributions that may carry it."""

    name: str
    module: str
    distributions: tuple[str, ...]
    tried: bool = False


OPTIONAL_PACKAGES = (
    OptionalPackage("triton", "triton", ("triton", "pytorch-triton"), tried=True),
    OptionalPackage("flashinfer", "flashinfer", ("flashinfer-python",), tried=True),
    OptionalPackage("vllm", "vllm.vllm_flash_attn", ("vllm",)),
    OptionalPackage(
        "flash_attn_interface", "flash_attn_interface", ("flash-attn-3", "flash_attn_3")
    ),
    OptionalPackage("flash_attn", "flash_attn", ("flash-attn",)),
    OptionalPackage("vllm_flash_attn", "vllm_flash_attn", ("vllm-flash-attn",)),
    OptionalPackage("flashinfer_jit_cache", "flashinfer_jit_cache", ("flashinfer-jit-cache",)),
    OptionalPackage("safetensors", "safetensors", ("safetensors",)),
    OptionalPackage("tokenizers", "tokenizers", ("tokenizers",)),
    OptionalPackage("huggingface_hub", "huggingface_hub", ("huggingface-hub",)),
    OptionalPackage("transformers", "transformers", ("transformers",)),
    OptionalPackage("ray", "ray", ("ray",)),
    OptionalPackage("fastapi", "fastapi", ("fastapi",)),
)

CHILD = """
import importlib, json, sys
for name, module in json.loads(sys.argv[1]):
    print(json.dumps([name, "starts"]), flush=True)
    try:
        importlib.import_module(module)
        reason = None
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
    print(json.dumps([name, "ends", reason]), flush=True)
"""


def probe_torch() -> Torch:
    """Version and CUDA build of torch; `problem` where it is missing or cannot be read."""
    version = _version(("torch",))
    if version is None:
        return Torch(version=None, problem="torch is not installed")
    try:
        spec = util.find_spec("torch")
        if spec is None or spec.origin is None:
            return Torch(version=version, problem="torch is installed but its module is not found")
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, ImportError, ValueError) as error:
        return Torch(version=version, problem=f"torch's build could not be read: {error}")
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return Torch(version=version, cuda=match[1] if match else None)


def probe_packages(
    packages: Sequence[OptionalPackage] = OPTIONAL_PACKAGES, python: str = sys.executable
) -> dict[str, Package]:
    """Version of each optional package, and whether a fresh interpreter imports a tried one."""
    versions = {package.name: _version(package.distributions) for package in packages}
    tried = [(p.name, p.module) for p in packages if p.tried and versions[p.name] is not None]
    reasons = _try_imports(tried, python)
    return {name: _package(version, name, reasons) for name, version in versions.items()}


def _package(version: str | None, name: str, reasons: Mapping[str, str | None]) -> Package:
    if name not in reasons:
        return Package(version=version)
    return Package(version=version, imports=reasons[name] is None, problem=reasons[name])


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            found: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return found or "unknown"  # damaged metadata has no version
    return None


def _try_imports(modules: Sequence[tuple[str, str]], python: str) -> dict[str, str | None]:
    """For each (name, module) why it does not import, or None.

    One child tries all; where it crashes, a new one goes on with the rest.
    """
    reasons: dict[str, str | None] = {}
    deadline = time.monotonic() + IMPORT_TIMEOUT_S
    rest = list(modules)
    while rest:
        output, ended = _run_child(rest, python, deadline - time.monotonic())
        current = rest[0][0]
        for line in output.splitlines():
            name, state, *reason = _report(line)
            if state == "starts":
                current = name
            elif state == "ends":
                reasons[name] = reason[0]
        if current not in reasons:
            reasons[current] = ended
        rest = [item for item in rest if item[0] not in reasons]
    return reasons


def _report(line: str) -> list[str]:
    """One line of the child, or what is no report of ours (packages may print on import)."""
    try:
        words = json.loads(line)
    except json.JSONDecodeError:
        return ["", ""]
    return words if isinstance(words, list) and len(words) >= 2 else ["", ""]


def _run_child(
    modules: Sequence[tuple[str, str]], python: str, timeout_s: float
) -> tuple[str, str]:
    """The child's output, and how it ended in words."""
    command = [python, "-c", CHILD, json.dumps(list(modules))]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            text=True, errors="replace", timeout=max(timeout_s, 0.001), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        output = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return output, f"not imported: {IMPORT_TIMEOUT_S:.0f} s for all imports were over"
    except OSError as error:
        return "", f"not tried: {python or 'the interpreter'} does not start: {error}"
    return done.stdout, f"importing it ended the interpreter with status {done.returncode}"


def probe_compiler(environ: Mapping[str, str], include: str | None = None) -> Compiler:
    """The C++ compiler of CXX (the user's word: no other is tried), else the first that works.

    Looked for are g++, clang++ and c++. A CC that is set and does not run counts as broken too:
    Python's own builds call it for C++ sources.
    """
    include = include if include is not None else sysconfig.get_paths().get("include", "")
    headers = (Path(include) / "Python.h").is_file()
    for variable in ("CC", "CXX"):
        command = environ.get(variable, "").strip()
        if not command:
            continue
        path, version, problem = _ask_compiler(command, environ)
        if problem is not None:
            problem = f"{variable}={command}: {problem}"
        if problem is not None or variable == "CXX":
            return Compiler(path=path, version=version, python_headers=headers, problem=problem)
    return _first_compiler(environ, headers)


def _first_compiler(environ: Mapping[str, str], headers: bool) -> Compiler:
    broken = None
    for name in ("g++", "clang++", "c++"):
        path, version, problem = _ask_compiler(name, environ)
        if path is not None and problem is None:
            return Compiler(path=path, version=version, python_headers=headers)
        if path is not None and broken is None:
            broken = Compiler(path=path, python_headers=headers, problem=problem)
    nothing = "no C++ compiler: g++, clang++ and c++ are not in PATH and CXX is not set"
    return broken or Compiler(path=None, python_headers=headers, problem=nothing)


def probe_nvcc(environ: Mapping[str, str]) -> str | None:
    """Version of nvcc in PATH, else in CUDA_HOME, CUDA_PATH or /usr/local/cuda; None without."""
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    for command in ("nvcc", *(f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda"))):
        path, _, problem = _ask_compiler(shlex.quote(command), environ)
        if path is None or problem is not None:
            continue
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", check=False
        )
        release = re.search(r"release (\d+\.\d+)", done.stdout)
        return release[1] if release else "unknown"
    return None


def _ask_compiler(
    command: str, environ: Mapping[str, str]
) -> tuple[str | None, str | None, str | None]:
    """(path, first line of --version, problem) of a compiler command such as "ccache g++"."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return None, None, f"cannot be split into words: {error}"
    path = shutil.which(words[0], path=environ.get("PATH", ""))
    if path is None:
        return None, None, "not found"
    try:
        done = subprocess.run(
            [path, *words[1:], "--version"], capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=COMPILER_TIMEOUT_S, env=dict(environ), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return path, None, f"did not answer --version within {COMPILER_TIMEOUT_S:.0f} s"
    except OSError as error:
        return path, None, f"does not start: {error.strerror or error}"
    if done.returncode != 0:
        return path, None, f"--version exits with {done.returncode}"
    return path, (done.stdout.splitlines() or ["version unknown"])[0].strip(), None
