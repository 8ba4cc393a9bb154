"""The Serve application: a gateway deployment (FastAPI ingress) in front of a worker deployment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.handle import DeploymentHandle

from ..actors.link import HandleLink
from ..runtime.checkpoint.source import open_checkpoint
from ..runtime.config import EngineConfig
from .api_settings import ApiSettings
from .gateway import Gateway
from .pool import worker_deployment
from .roster import follow
from .routes import build_api

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "gateway"


class OneRequestId:
    """Drops our X-Request-Id header: Serve's proxy adds it too, and clients join the two."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(k, v) for k, v in message["headers"] if k.lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, send_without)


@serve.ingress()
class GatewayReplica:
    """Loads the model's text parts, finds the workers, and answers HTTP."""

    async def __init__(
        self, workers: DeploymentHandle, config: EngineConfig, settings: ApiSettings | None = None
    ) -> None:
        self._gateway = Gateway(settings)
        # Opened without the weights: a gateway needs only the tokenizer and the template.
        checkpoint = await asyncio.to_thread(open_checkpoint, config.model, weights=False)
        self._gateway.add_checkpoint(
            checkpoint, name=config.served_model_name, chat_template=config.chat_template
        )
        self._roster = asyncio.create_task(follow(self._gateway, HandleLink(workers)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        api = build_api(self._gateway)
        api.add_middleware(OneRequestId)
        return api

    async def __del__(self) -> None:
        if hasattr(self, "_roster"):
            self._roster.cancel()
        self._gateway.close()


def build_application(
    config: EngineConfig,
    *,
    worker_cpus: float,
    worker_gpus: float,
    gateway_cpus: float,
    max_running: int,
    startup_key: str | None = None,
    settings: ApiSettings | None = None,
) -> Application:
    """Both deployments, bound. `max_running` is how many requests the worker's engine runs and
    queues at most.
    """
    workers = worker_deployment(
        config,
        num_cpus=worker_cpus,
        num_gpus=worker_gpus,
        max_running=max_running,
        startup_key=startup_key,
    )
    gateway = serve.deployment(
        name=NAME,
        # Far above what the workers hold: a full queue must be answered 429, and /health always.
        max_ongoing_requests=2 * max_running + 256,
        ray_actor_options={"num_cpus": gateway_cpus},
        health_check_period_s=2,
        health_check_timeout_s=60,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=20,
        max_constructor_retry_count=1,
    )(GatewayReplica)
    return gateway.bind(workers, config, settings)
