"""The Serve application: a gateway deployment (FastAPI ingress) in front of pools of workers."""

from __future__ import annotations

import asyncio
import base64
import gc
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from ..runtime.checkpoint.source import open_checkpoint
from .autoscaling_controller import read_journal
from .autoscaling_report import report
from .fleet import FleetSpec, ModelSpec, deployment_name
from .front import FrontAddress, FrontDoor
from .gateway import Gateway
from .ledger_actor import connect_ledger
from .ledger_shared import SharedLedger
from .loop_watch import LoopWatch
from .pool import OBEDIENT, worker_deployment
from .pool_archive import PoolArchive, RayStore
from .roster import follow
from .routes import build_api

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "gateway"
UPDATE_DRAIN_S = 300.0  # streams of a gateway that an update replaces have so long
DRAIN_S = 15.0  # a gateway that leaves lets its answers end for so long
FAREWELL_S = 2.0  # of these, to say so to clients whose answers do not


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
        self._watch = LoopWatch(self._gateway.metrics.count_late)
        self._watch.start()
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
                wake_s=wake_s(model),
                max_model_len=longest(model),
                pools=model.pools,
            )
        self._fleet = fleet
        self._archive: PoolArchive | None = None
        if fleet.is_elastic:
            self._gateway.read_scaling = read_journal
            app = serve.get_replica_context().app_name
            self._archive = PoolArchive(app, self._gateway.models, RayStore())
            await self._archive.start()
        self._rosters = [
            asyncio.create_task(follow(self._gateway, workers)) for workers in pools.values()
        ]
        self._door: FrontDoor | None = None
        if front is not None:
            door = FrontDoor(build_api(self._gateway, self._auth, self._ledger), front)
            await door.open()
            self._door = door
        gc.freeze()  # for the reason that long_lived.py states

    def __serve_build_asgi_app__(self) -> FastAPI:
        api = build_api(self._gateway, self._auth, self._ledger)
        api.add_middleware(OneRequestId)
        return api

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the scaling policy; Serve asks once a second where the fleet is elastic."""
        return report(self._fleet, self._gateway.models, asyncio.get_running_loop().time())

    def check_health(self) -> None:
        """A gateway that has lost its own HTTP server is replaced."""
        if self._door is not None and (why := self._door.why_closed()):
            raise RuntimeError(why)

    async def say_goodbye(self) -> None:
        """Whoever waits for an answer is told that none comes, and nobody is let in any more."""
        await self._gateway.open_requests.end_all()

    async def __del__(self) -> None:
        if hasattr(self, "_gateway"):
            self._gateway.open_requests.end_waiting()
        door: FrontDoor | None = getattr(self, "_door", None)
        if door is not None:
            closing = asyncio.create_task(door.close(DRAIN_S))
            await asyncio.wait({closing}, timeout=DRAIN_S - FAREWELL_S)
            await self.say_goodbye()
            await closing
        for roster in getattr(self, "_rosters", ()):
            roster.cancel()
        if hasattr(self, "_watch"):
            self._watch.close()
        ledger: SharedLedger | None = getattr(self, "_ledger", None)
        if ledger is not None:
            ledger.close()
        archive: PoolArchive | None = getattr(self, "_archive", None)
        if archive is not None:
            archive.close()
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
        most += pool.most_workers * pool.at_most()
    count: dict[str, Any] = {}
    if fleet.is_elastic:  # the policy sees the reports of deployments that are scaled, no others
        count = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1, **OBEDIENT}}
    gateway = serve.deployment(
        name=NAME,
        **count,
        # Far above what the workers hold: a full queue must be answered 429, and /health always.
        max_ongoing_requests=2 * most + 256,
        ray_actor_options=_gateway_options(fleet, front),
        health_check_period_s=2,
        health_check_timeout_s=60,
        graceful_shutdown_wait_loop_s=0.1,
        # Behind Serve's proxy an update puts the next gateway beside this one, which first ends
        # its streams; a front door has its port for itself, and leaves with the whole application.
        max_surge_percent=100 if front is None else 0,
        graceful_shutdown_timeout_s=UPDATE_DRAIN_S if front is None else DRAIN_S + 5,
        max_constructor_retry_count=1,
    )(GatewayReplica)
    return gateway.bind(fleet, pools, front)


def _gateway_options(fleet: FleetSpec, front: FrontAddress | None) -> dict[str, object]:
    if front is None:
        return {"num_cpus": fleet.gateway_cpus}
    # Only this node has the address. It may be full, and a front door must not wait for room.
    return {"num_cpus": 0, "label_selector": {"ray.io/node-id": front.node_id}}


def wake_s(model: ModelSpec) -> float | None:
    """Seconds until a sleeping model answers, as stated; None: its pools are not scaled."""
    return max((pool.cold_start_s for pool in model.pools if pool.is_elastic), default=None)


def longest(model: ModelSpec) -> int | None:
    """Tokens of the longest context that a pool of it was given; None: the model's own."""
    lengths = [pool.engine.max_model_len for pool in model.pools]
    return None if None in lengths else max(filter(None, lengths), default=None)


def packed(fleet: FleetSpec, startup_key: str, front: FrontAddress) -> dict[str, str]:
    """What `unpacked` is given: Serve hashes the arguments of an application as JSON."""
    return {"packed": base64.b64encode(pickle.dumps((fleet, startup_key, front))).decode()}


def unpacked(args: dict[str, str]) -> Application:
    """The application of a `polypath serve` whose pools are scaled: a policy over all pools can be
    given to Serve in its declarative form only, which names the application by import path.
    """
    fleet, startup_key, front = pickle.loads(base64.b64decode(args["packed"]))
    return build_application(fleet, startup_key=startup_key, front=front)


def app(args: dict[str, Any]) -> Application:  # Any: what Ray's config file holds
    """For Ray's own config file: `import_path: polypath.deployments.app:app`, with the keys of a
    serve.yaml as `args`. Raises ConfigurationError; Serve then shows its text as the status.
    """
    import ray

    from .cluster_state import ClusterState
    from .nodes import ray_nodes
    from .serve_check import check_cluster
    from .serve_config import fleet_from_args
    from .serve_preparation import absolute

    fleet = absolute(fleet_from_args(args))
    cluster = ClusterState(ray.get_runtime_context().gcs_address)
    # An update replaces what runs, so what it takes counts as free.
    nodes = [replace(node, free=dict(node.total)) for node in ray_nodes(cluster)]
    return build_application(check_cluster(fleet, nodes, is_head_here=False).fleet)
