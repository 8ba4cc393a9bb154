"""The worker as a Ray Serve deployment: one replica is one `actors/worker.py` Worker with its
engine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from ..actors.place import Place
from ..actors.road_server import RoadServer
from ..runtime.config import EngineConfig
from ..runtime.errors import EngineError, PolypathError
from ..runtime.request import Request, RequestOutput
from .fleet import DEFAULT_POOL, PoolSpec
from .long_lived import long_lived
from .replica_router import ROUTER
from .startup import StartupReporter

if TYPE_CHECKING:
    from ray.serve import Application

    from ..actors.worker import Worker

NAME = "worker"
REFUSAL_MARGIN = 64  # calls beyond the engine's own limits, so that it is the engine that says 429
HEARTBEAT_LIMIT_S = 120.0  # the longest step we believe in
DRAIN_S = 30.0  # a worker that leaves goes on for so long with what it has
OBEDIENT = {  # a deployment that has what the policy says, at once; its own delays are the policy's
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 0.0,
    "downscale_to_zero_delay_s": 0.0,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 2.0,
    "target_ongoing_requests": 1e6,  # no policy but ours is asked; this is for its absence
}
WAKE_TRIES = 3
STOP_MARGIN_S = 20.0  # then it hands over and stops its engine, before Serve kills it

logger = logging.getLogger("polypath.pool")


class WorkerReplica:
    """Starts an engine in the replica's process and passes calls on to it."""

    drain_s = DRAIN_S

    async def __init__(
        self,
        config: EngineConfig,
        startup_key: str | None = None,
        pool: str = DEFAULT_POOL,
        edition: str = "",
    ) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        report = StartupReporter(f"{startup_key}/{replica}") if startup_key else None
        place = _place(pool, edition)
        self._replica = replica
        try:
            with long_lived():
                self._worker = self.make_worker(config, place)
                await asyncio.to_thread(self._worker.start, report)
        except PolypathError as error:
            if report:
                report.failed(str(error))
            raise
        self._road = RoadServer(self._worker)
        self._offer = await _open_road(self._road, place.address)

    def make_worker(self, config: EngineConfig, place: Place) -> Worker:
        """What serves here, not yet started; tests put their own in."""
        from ..actors.worker import Worker  # imports torch, which only this process needs

        return Worker(config, place)

    async def generate(self, request: Request, to: str) -> AsyncGenerator[RequestOutput, None]:
        """One item per engine step; a cancelled call cancels the request."""
        self._require_me(to)
        async with aclosing(self._worker.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def cancel(self, request_id: str, to: str) -> None:
        self._require_me(to)
        self._worker.cancel(request_id)

    async def describe(self, to: str) -> dict[str, Any]:  # JSON
        self._require_me(to)
        return self._worker.describe()

    async def hold(self, is_held: bool, to: str) -> None:
        self._require_me(to)
        self._road.hold(is_held)

    async def stats(self, to: str) -> dict[str, Any]:  # JSON
        self._require_me(to)
        return self._worker.stats()

    def _require_me(self, to: str) -> None:
        """Raises EngineError when Serve's router had to send a call elsewhere than it was meant."""
        if to != self._replica:
            raise EngineError(f"the worker died: its replica {to} is gone")

    async def offer(self) -> dict[str, Any]:  # JSON
        """What Serve's list of replicas says too, for gateways that are not told."""
        return self.record_replica_metadata()

    def record_replica_metadata(self) -> dict[str, Any]:  # JSON; Serve asks once, after __init__
        """What gateways may know of this worker without a call; it holds the key of its road."""
        return {**self._worker.describe(), "replica": self._replica, "road": self._offer}

    def check_health(self) -> None:
        """Alive means that the step loop moves: a busy engine is never killed for being busy."""
        failure = self._worker.failure()
        if failure is not None:
            raise RuntimeError(failure)
        age = self._worker.heartbeat_age_s()
        if age > HEARTBEAT_LIMIT_S:
            raise RuntimeError(f"the engine's step loop has not moved for {age:.0f} s")

    async def __del__(self) -> None:
        """Serve sends this replica nothing more; gateways do over their roads until they are told.

        What runs may end within `drain_s`; what does not goes on with another worker.
        """
        if hasattr(self, "_road"):
            await self._road.drain(self.drain_s)
        if hasattr(self, "_worker"):
            await asyncio.to_thread(self._worker.stop)


async def _open_road(road: RoadServer, address: str) -> dict[str, Any] | None:  # JSON
    """Listen on this machine, and on the node's address unless that is loopback. None: gateways
    use Serve's handle, as when no road were built.
    """
    host = None if ipaddress.ip_address(address).is_loopback else address
    try:
        return (await road.start(host)).to_json()
    except (OSError, ValueError):
        logger.exception("no road can be opened on %s; gateways will use Serve's handle", address)
        return None


def _place(pool: str, edition: str) -> Place:
    """What Ray says of the process that asks."""
    context = ray.get_runtime_context()
    return Place(
        pool=pool,
        node_id=context.get_node_id(),
        address=ray.util.get_node_ip_address(),
        labels={name: str(value) for name, value in context.get_node_labels().items()},
        num_cpus=context.get_assigned_resources().get("CPU"),
        edition=edition,
    )


def worker_deployment(
    pool: PoolSpec, *, name: str = NAME, startup_key: str | None = None
) -> Application:
    """A pool of workers, bound."""
    count: dict[str, Any] = {"num_replicas": pool.num_workers}
    if pool.is_elastic:
        bounds = {"min_replicas": pool.num_workers, "max_replicas": pool.most_workers}
        count = {"autoscaling_config": {**bounds, **OBEDIENT}}
    deployment = serve.deployment(
        name=name,
        **count,
        max_ongoing_requests=pool.at_most() + REFUSAL_MARGIN,
        max_surge_percent=pool.max_surge_percent,
        ray_actor_options=actor_options(pool),
        health_check_period_s=1,
        health_check_timeout_s=60,  # a machine that was suspended comes back late, not dead
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_S + STOP_MARGIN_S,
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": ROUTER}),
        # A pool that starts asleep has shown nobody that it can start: one bad moment of a node,
        # such as too little memory, should not end it until the next deploy.
        max_constructor_retry_count=1 if pool.num_workers else WAKE_TRIES,
    )(WorkerReplica)
    return deployment.bind(pool.engine, startup_key, pool.name, pool.edition)


def actor_options(pool: PoolSpec) -> dict[str, object]:
    """What Ray must find on a node before it puts a worker there."""
    assert pool.num_cpus is not None, "placing fills in the CPUs"
    options: dict[str, object] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.resources:
        options["resources"] = dict(pool.resources)
    if pool.label_selector:
        options["label_selector"] = dict(pool.label_selector)
    if pool.accelerator_type is not None:
        options["accelerator_type"] = pool.accelerator_type
    return options
