"""One `polypath serve` from start to stop: listen, plan, Ray, application, ready, and everything
down again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..runtime.checkpoint.source import open_checkpoint
from ..runtime.config import EngineConfig
from ..runtime.errors import ConfigurationError, PolypathError
from ..runtime.planning.planner import plan as make_plan
from ..runtime.planning.probe import probe
from . import listen
from .config import ServeConfig
from .interrupts import Interrupts, StopAsked
from .ray_local import LocalRay
from .ray_named import NamedRay
from .serve_view import ServeView

if TYPE_CHECKING:
    from ..runtime.planning.plan import ExecutionPlan
    from .deploy import Deployment

T = TypeVar("T")

UNKNOWN_MAX_RUNNING = 1024  # on a named cluster the worker's plan is made there
POLL_S = 0.1
WATCH_S = 1.0
STOP_LIMIT_S = 8.0
STOP_BUSY_LIMIT_S = 2.0  # while Ray still starts or stops something
GATEWAY_LIMIT_S = 60.0  # from a ready worker to an answer over HTTP


def serve(config: EngineConfig, where: ServeConfig, view: ServeView) -> int:
    """Serve until a signal comes; the exit code. 2: refused before anything started. 1: the start
    failed.
    """
    try:
        host, port = listen.claim(where.host, where.port)
        ray, max_running = _choose_ray(config, where, view)
        ray.prepare()
    except ConfigurationError as error:
        view.refuse(error)
        return 2
    return Session(_absolute(config, where), ray, max_running, view).run(host, port)


class Session:
    """What runs between the first process started and the last one ended."""

    def __init__(
        self, config: EngineConfig, ray: LocalRay | NamedRay, max_running: int, view: ServeView
    ) -> None:
        self._config = config
        self._ray = ray
        self._max_running = max_running
        self._view = view
        # One thread for all of Ray: its processes end when the thread that started them does.
        self._thread = ThreadPoolExecutor(1, "ray")
        self._deployment: Deployment | None = None
        self._busy: Future[Any] | None = None  # the last call into Ray

    def run(self, host: str, port: int) -> int:
        """Start, watch, stop; the exit code."""
        code = 0
        with Interrupts(on_second=self._give_up) as interrupts, _chatter_to(self._ray.chatter):
            try:
                self._start(interrupts, host, port)
                self._view.ready(listen.url(host, port), self._name(), listen.warning(host, port))
                self._watch(interrupts)
            except StopAsked:
                self._view.stopping(self._ray.is_ours)
            except PolypathError as error:
                code = 1
                self._view.error(str(error), logs=self._ray.logs)
            finally:
                self._stop(code)
        return code

    def _start(self, interrupts: Interrupts, host: str, port: int) -> None:
        self._view.stage("ray", self._ray.name)
        started = self._busy = self._thread.submit(self._ray.start)
        from .deploy import Deployment  # imports Serve and FastAPI while Ray starts

        interrupts.wait_for(started)
        self._ray.watch()
        self._view.stage("serve", "")
        num_gpus = self._ray.num_gpus if isinstance(self._ray, LocalRay) else 0
        deployment = Deployment(self._config, max_running=self._max_running, num_gpus=num_gpus)
        self._deployment = deployment
        if isinstance(self._ray, NamedRay):
            self._call(interrupts, self._ray.claim)
        self._call(interrupts, lambda: deployment.submit(host, port))
        self._await_ready(interrupts, deployment)

    def _await_ready(self, interrupts: Interrupts, deployment: Deployment) -> None:
        from .deploy import StartFailed

        self._view.stage("worker", "")
        ready_since: float | None = None
        while True:
            progress = self._call(interrupts, deployment.progress)
            self._ray.watch()
            self._view.progress(progress.record.events)
            if progress.failure:
                raise StartFailed(progress.failure)
            if progress.record.attempt > 1:
                raise StartFailed(_died(progress.record.events))
            if progress.is_serving:
                return
            if progress.record.is_ready:
                ready_since = ready_since or time.monotonic()
                if time.monotonic() - ready_since > GATEWAY_LIMIT_S:
                    raise StartFailed(
                        "the worker is ready, but the gateway did not answer for "
                        f"{GATEWAY_LIMIT_S:.0f} s"
                    )
            interrupts.sleep(POLL_S)

    def _watch(self, interrupts: Interrupts) -> None:
        """Until a signal comes: note new processes, and say when a worker died and is back."""
        assert self._deployment is not None, "watching starts after the deployment is ready"
        attempt, was_ready = 1, True
        while True:
            interrupts.sleep(WATCH_S)
            self._ray.watch()
            record = self._call(interrupts, self._deployment.record)
            if record.attempt != attempt:
                attempt, was_ready = record.attempt, False
                self._view.note("the worker died; a new one is starting")
            if record.is_ready and not was_ready:
                was_ready = True
                self._view.note(f"the worker is back (process {record.pid})")

    def _call(self, interrupts: Interrupts, function: Callable[[], T]) -> T:
        """Call into Ray on its thread, with signals heard meanwhile."""
        self._busy = future = self._thread.submit(function)
        return interrupts.wait_for(future)

    def _stop(self, code: int) -> None:
        """Orderly, unless Ray is in the middle of something or hangs: nothing of ours may stay."""
        stopped = self._thread.submit(self._ray.stop, keep_logs=code != 0)
        limit_s = STOP_LIMIT_S
        if self._busy is not None and not self._busy.done():
            limit_s = STOP_BUSY_LIMIT_S
        done, _ = wait([stopped], timeout=limit_s)
        self._view.close()
        if not done:
            self._ray.kill()
            _leave(code)
        self._thread.shutdown()
        stopped.result()

    def _give_up(self) -> None:
        self._view.close()
        self._ray.kill()
        _leave(130)

    def _name(self) -> str:
        return self._config.served_model_name or open_checkpoint(self._config.model).name


def _choose_ray(
    config: EngineConfig, where: ServeConfig, view: ServeView
) -> tuple[LocalRay | NamedRay, int]:
    """The Ray to use and how many requests its worker will hold. For our own Ray the plan is made
    and shown here.
    """
    if where.address is not None:
        view.title(config.model)
        return NamedRay(where.address, where.address_origin), _max_running(None, config)
    hardware = probe()
    checkpoint = open_checkpoint(config.model)
    plan = make_plan(hardware, checkpoint.config, config)
    view.plan(checkpoint, plan)
    ray = LocalRay(
        num_cpus=hardware.cpu.cores_usable,
        num_gpus=1 if plan.device == "cuda" else 0,
        environment=plan.environment,
    )
    return ray, _max_running(plan, config)


def _max_running(plan: ExecutionPlan | None, config: EngineConfig) -> int:
    if plan is not None:
        return plan.max_num_seqs + plan.max_waiting
    return (config.max_num_seqs or 0) + (config.max_waiting or UNKNOWN_MAX_RUNNING)


def _absolute(config: EngineConfig, where: ServeConfig) -> EngineConfig:
    """Workers have another working directory, so a path must not depend on ours."""
    path = Path(config.model).expanduser()
    if config.model and path.exists():
        return replace(config, model=str(path.resolve()))
    return config


def _died(events: list[dict[str, object]]) -> str:
    last = str(events[-1]["stage"]) if events else "its first lines"
    return f"the worker's process died during {last} without a word; is there enough memory?"


@contextmanager
def _chatter_to(file: Path) -> Iterator[None]:
    """Send to a file what Ray and Serve print in this process; the view has the terminal."""
    log = file.open("a")  # never closed: what Ray imports here keeps it until the process ends
    with redirect_stdout(log), redirect_stderr(log):
        yield


def _leave(code: int) -> None:
    os._exit(code)
