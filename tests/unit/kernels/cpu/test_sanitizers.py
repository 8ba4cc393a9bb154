"""The native kernels and the thread team under the address and the thread sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[3] / "kernels" / "cpu"
FLAGS = ["-std=c++17", "-O1", "-g", "-pthread", "-fno-omit-frame-pointer"]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("isa", [[], ["-mavx2", "-mfma", "-mf16c"]], ids=["portable", "avx2"])
def test_no_sanitizer_complains(tmp_path: Path, sanitizer: str, isa: list[str]) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    if isa and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    program = tmp_path / "exercise"
    sources = [HERE / "exercise.cpp", *(p for p in KERNELS.glob("*.cpp") if p.name != "api.cpp")]
    command = [compiler, *FLAGS, *isa, f"-fsanitize={sanitizer}", f"-I{KERNELS}"]
    command += ["-fno-sanitize-recover=all"]

    def compiled(source: Path) -> str:
        target = str(tmp_path / f"{source.stem}.o")
        subprocess.run([*command, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([*command, *objects, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr[:4000]
