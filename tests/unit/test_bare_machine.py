"""What must work where only torch, tokenizers and numpy are installed, and where transformers is
not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCK = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # makes `import name` raise ModuleNotFoundError
"""

ENGINE = """
from polypath.runtime.bench import Workload, measure
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine
from polypath.runtime.request import SamplingParams

engine = Engine.build(EngineConfig(model=sys.argv[1]))
greedy = SamplingParams(temperature=0, max_tokens=2)
(answer,) = engine.generate(["The capital of France is"], greedy)
assert answer.text == " Paris.", answer.text
assert measure(engine, Workload(batch=2, prompt_tokens=8, new_tokens=4)).decode_tokens_s > 0
print("ok")
"""

SERVER = """
import asyncio
import httpx
from polypath.actors.link import LocalLink
from polypath.actors.worker import Worker
from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.config import EngineConfig

async def main():
    worker = Worker(EngineConfig(model=sys.argv[1]))
    worker.start()
    gateway = Gateway()
    gateway.add_checkpoint(open_checkpoint(sys.argv[1]), name=worker.describe()["model"])
    await gateway.add_worker(LocalLink(worker))
    transport = httpx.ASGITransport(build_api(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        message = {"role": "user", "content": "Is Paris the capital of France?"}
        body = {"model": worker.describe()["model"], "messages": [message], "temperature": 0}
        body["max_tokens"] = 8
        answer = await client.post("/v1/chat/completions", json=body, timeout=60)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"], answer.text
    gateway.close()
    worker.stop()
    print("ok")

asyncio.run(main())
"""


def run(code: str, model: Path, blocked: tuple[str, ...]) -> None:
    program = BLOCK.format(blocked=blocked) + code
    command = [sys.executable, "-c", program, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr[-3000:]


def test_the_engine_runs_without_serving_packages(default_model_path: Path) -> None:
    packages = ("ray", "fastapi", "starlette", "pydantic", "uvicorn", "gguf", "transformers")
    run(ENGINE, default_model_path, (*packages, "msgspec", "prometheus_client", "typer", "rich"))


def test_the_api_serves_without_transformers(default_model_path: Path) -> None:
    run(SERVER, default_model_path, ("transformers", "gguf"))
