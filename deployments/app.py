"""The Serve application: a gateway deployment (FastAPI ingress) in front of pools of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from ..runtime.checkpoint.source import open_checkpoint
from .fleet import FleetSpec, deployment_name
from .front import FrontAddress, FrontDoor
from .gateway import Gateway
from .ledger_actor import connect_ledger
from .ledger_shared import SharedLedger
from .pool import worker_deployment
from .roster import follow
from .routes import build_api

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "gateway"
DRAIN_S = 15.0  # a gateway that leaves lets its answers end for so long


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
    """Loads the models' text parts, finds the workers, and answers HTTP."""

    async def __init__(
        self,
        fleet: FleetSpec,
        pools: Mapping[str, DeploymentHandle],
        front: FrontAddress | None = None,
    ) -> None:
        self._gateway = Gateway(fleet.settings)
        self._auth = fleet.auth
        self._ledger: SharedLedger | None = None
        if fleet.auth.has_limits:
            self._ledger = SharedLedger(self._gateway.id, connect_ledger)
            await self._ledger.start()
        for model in fleet.models:
            # Opened without the weights: a gateway needs only the tokenizer and the template.
            checkpoint = await asyncio.to_thread(open_checkpoint, model.model, weights=False)
            self._gateway.add_checkpoint(
                checkpoint,
                name=model.name,
                chat_template=model.chat_template,
                rules=model.rules,
            )
        self._rosters = [
            asyncio.create_task(follow(self._gateway, workers)) for workers in pools.values()
        ]
        self._door: FrontDoor | None = None
        if front is not None:
            door = FrontDoor(build_api(self._gateway, self._auth, self._ledger), front)
            await door.open()
            self._door = door

    def __serve_build_asgi_app__(self) -> FastAPI:
        api = build_api(self._gateway, self._auth, self._ledger)
        api.add_middleware(OneRequestId)
        return api

    def check_health(self) -> None:
        """A gateway that has lost its own HTTP server is replaced."""
        if self._door is not None and (why := self._door.why_closed()):
            raise RuntimeError(why)

    async def __del__(self) -> None:
        door: FrontDoor | None = getattr(self, "_door", None)
        if door is not None:
            await door.close(DRAIN_S)
        for roster in getattr(self, "_rosters", ()):
            roster.cancel()
        ledger: SharedLedger | None = getattr(self, "_ledger", None)
        if ledger is not None:
            ledger.close()
        self._gateway.close()


def build_application(
    fleet: FleetSpec, *, startup_key: str | None = None, front: FrontAddress | None = None
) -> Application:
    """A deployment for each pool, and the gateway in front of them, bound. Every pool's CPUs are
    filled in (placement.py). Workers tell how far they are under `startup_key`/deployment. With
    `front` the gateway listens itself, on that node; else Serve's proxy does.
    """
    pools, most = {}, 0
    for model, pool in fleet.pools():
        name = deployment_name(fleet, model, pool)
        key = f"{startup_key}/{name}" if startup_key else None
        pools[name] = worker_deployment(pool, name=name, startup_key=key)
        most += pool.num_workers * pool.at_most()
    gateway = serve.deployment(
        name=NAME,
        # Far above what the workers hold: a full queue must be answered 429, and /health always.
        max_ongoing_requests=2 * most + 256,
        ray_actor_options=_gateway_options(fleet, front),
        health_check_period_s=2,
        health_check_timeout_s=60,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_S + 5,
        max_constructor_retry_count=1,
    )(GatewayReplica)
    return gateway.bind(fleet, pools, front)


def _gateway_options(fleet: FleetSpec, front: FrontAddress | None) -> dict[str, object]:
    if front is None:
        return {"num_cpus": fleet.gateway_cpus}
    # Only this node has the address. It may be full, and a front door must not wait for room.
    return {"num_cpus": 0, "label_selector": {"ray.io/node-id": front.node_id}}


def app(args: dict[str, Any]) -> Application:  # Any: what Ray's config file holds
    """For Ray's own config file: `import_path: polypath.deployments.app:app`, with the keys of a
    serve.yaml as `args`. Raises ConfigurationError; Serve then shows its text as the status.
    """
    from .nodes import ray_nodes
    from .serve_check import check_cluster
    from .serve_config import fleet_from_args
    from .serve_preparation import absolute

    fleet = absolute(fleet_from_args(args))
    # An update replaces what runs, so what it takes counts as free.
    nodes = [replace(node, free=dict(node.total)) for node in ray_nodes()]
    return build_application(check_cluster(fleet, nodes, is_head_here=False).fleet)
