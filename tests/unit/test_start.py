"""A start imports what it needs and nothing else: that, and no clock, keeps it short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIRST_TOKEN = """
import json, sys
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine
from polypath.runtime.request import Request, SamplingParams

seconds = {}
engine = Engine.build(
    EngineConfig(model=sys.argv[1]),
    on_progress=lambda event: event.seconds and seconds.update({event.stage: event.seconds}),
)
prompt = tuple(engine.tokenizer.encode("The capital of France is"))
engine.submit(Request(id="a", prompt_ids=prompt, sampling=SamplingParams(temperature=0.0)))
(output,) = engine.step()
assert output.token_ids, output
print(json.dumps({"modules": sorted(sys.modules), "seconds": seconds}))
"""

NEVER = (
    *("transformers", "huggingface_hub", "gguf", "jinja2", "safetensors", "ray", "fastapi"),
    *("pydantic", "sympy", "scipy", "pandas", "torch._dynamo", "torch._inductor", "triton"),
    *("numpy.testing", "numpy.f2py", "matplotlib", "rich", "typer"),
)
"""Of what is installed for other purposes, whatever takes long to import."""

WITHOUT_TORCH = (
    "polypath.deployments.cli",
    "polypath.deployments.commands.serve",
    "polypath.deployments.serving",
    "polypath.deployments.gateway",
    "polypath.deployments.routes",
    "polypath.runtime.planning.planner",
    "polypath.runtime.planning.probe",
    "polypath.runtime.checkpoint.source",
)
"""What runs before or beside workers: torch alone takes longer to import than all of these."""


def _child(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_first_token_needs_no_module_that_takes_long(default_model_path: Path) -> None:
    found = json.loads(_child(FIRST_TOKEN, str(default_model_path)))
    assert not set(NEVER) & set(found["modules"])
    print({stage: round(seconds, 2) for stage, seconds in found["seconds"].items()})
    assert set(found["seconds"]) >= {"probe", "plan", "weights", "self_check"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_stands_beside_workers_starts_without_torch(module: str) -> None:
    program = f"import sys, {module}; print([m for m in ('torch', 'ray') if m in sys.modules])"
    assert _child(program) == "[]"
