"""Triton's paths are planned for a card on machines that have neither the card nor Triton."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # makes `import triton` raise ModuleNotFoundError
from polypath.runtime.config import EngineConfig
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.planner import plan
from polypath.tests.unit.planning.public_models import public_model

wishes = EngineConfig(model="m", ops="triton", attention_backend="triton")
found = plan(load_hardware("h100"), public_model("Llama-3.1-8B"), wishes)
print(*sorted({path.attention_backend + "+" + path.ops for path in found.paths.values()}))
"""


def test_planning_for_a_card_needs_no_triton_here() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["triton+triton"], done.stderr[-3000:]
