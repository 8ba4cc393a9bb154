"""A real engine over a tiny model behind the whole API, on a real socket of this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import torch
import uvicorn
from fastapi import FastAPI

from polypath.actors.link import LocalLink
from polypath.actors.worker import Worker
from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.runtime.config import EngineConfig


def start_worker(model: Path, **options: Any) -> Worker:
    """A ready worker; the caller stops it."""
    config = EngineConfig(model=str(model), served_model_name="tiny", **options)
    worker = Worker(config)
    worker.start()
    torch.set_num_threads(1)
    return worker


@asynccontextmanager
async def live_gateway(worker: Worker) -> AsyncIterator[Gateway]:
    """A gateway in this process over a local link to the worker."""
    gateway = Gateway()
    gateway.add_checkpoint(worker.engine.checkpoint, name="tiny")
    await gateway.add_worker(LocalLink(worker))
    yield gateway
    gateway.close()


@asynccontextmanager
async def live_server(served: Gateway | FastAPI) -> AsyncIterator[str]:
    """The URL of a uvicorn that serves a gateway, or its API, on a free loopback port."""
    api = build_api(served) if isinstance(served, Gateway) else served
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(api, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listening.close()


@asynccontextmanager
async def openai_client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client against the gateway over HTTP."""
    async with (
        live_server(gateway) as url,
        openai.DefaultAsyncHttpxClient(trust_env=False) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
        ) as client,
    ):
        yield client


async def until_idle(worker: Worker) -> None:
    """Wait until the engine runs, queues and holds nothing."""
    async with asyncio.timeout(5):
        while True:
            stats = worker.stats()
            if stats["running"] == stats["waiting"] == 0 and worker.num_open() == 0:
                return
            await asyncio.sleep(0.01)
