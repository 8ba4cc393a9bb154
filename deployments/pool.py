"""The worker as a Ray Serve deployment: one replica is one `actors/worker.py` Worker with its
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from ray import serve

from ..runtime.config import EngineConfig
from ..runtime.errors import PolypathError
from ..runtime.request import Request, RequestOutput
from .startup import StartupReporter

if TYPE_CHECKING:
    from ray.serve import Application

NAME = "worker"
REFUSAL_MARGIN = 64  # calls beyond the engine's own limits, so that it is the engine that says 429
HEARTBEAT_LIMIT_S = 120.0  # the longest step we believe in


class WorkerReplica:
    """Starts an engine in the replica's process and passes calls on to it."""

    async def __init__(self, config: EngineConfig, startup_key: str | None = None) -> None:
        report = StartupReporter(startup_key) if startup_key else None
        from ..actors.worker import Worker  # imports torch, which only this process needs

        self._worker = Worker(config)
        try:
            await asyncio.to_thread(self._worker.start, report)
        except PolypathError as error:
            if report:
                report.failed(str(error))
            raise

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """One item per engine step; a cancelled call cancels the request."""
        outputs = self._worker.generate(request)
        try:
            async for output in outputs:
                yield output
        finally:
            self._worker.cancel(request.id)

    async def cancel(self, request_id: str) -> None:
        self._worker.cancel(request_id)

    async def describe(self) -> dict[str, Any]:  # JSON
        return self._worker.describe()

    async def stats(self) -> dict[str, Any]:  # JSON
        return self._worker.stats()

    def record_replica_metadata(self) -> dict[str, Any]:  # JSON; Serve asks once, after __init__
        """What routers may know of this worker without a call."""
        return self._worker.describe()

    def check_health(self) -> None:
        """Alive means that the step loop moves: a busy engine is never killed for being busy."""
        failure = self._worker.failure()
        if failure is not None:
            raise RuntimeError(failure)
        age = self._worker.heartbeat_age_s()
        if age > HEARTBEAT_LIMIT_S:
            raise RuntimeError(f"the engine's step loop has not moved for {age:.0f} s")

    async def __del__(self) -> None:
        """Serve has drained this replica's streams by now, or its time is up."""
        if hasattr(self, "_worker"):
            await asyncio.to_thread(self._worker.stop)


def worker_deployment(
    config: EngineConfig,
    *,
    num_cpus: float,
    num_gpus: float = 0,
    max_running: int,
    startup_key: str | None = None,
) -> Application:
    """The worker pool, bound. `max_running` is how many requests the engine holds, running and
    waiting.
    """
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=max_running + REFUSAL_MARGIN,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        health_check_period_s=1,
        health_check_timeout_s=60,  # a machine that was suspended comes back late, not dead
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=20,
        max_constructor_retry_count=1,
    )(WorkerReplica)
    return deployment.bind(config, startup_key)
