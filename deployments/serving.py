"""One `polypath serve` from start to stop: listen, plan, Ray, application, ready, and everything
down again.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..runtime.collector import paused
from ..runtime.errors import ConfigurationError, PolypathError
from . import listen
from .exposure import exposure_notes
from .fleet import FleetSpec
from .interrupts import Interrupts, StopAsked
from .ray_local import LocalRay
from .ray_named import NamedRay
from .serve_check import check_cluster, check_own_ray
from .serve_preparation import ServeRequest, absolute
from .serve_view import ServeView
from .worker_life import WorkerLife

if TYPE_CHECKING:
    from .deploy import Deployment
    from .pool_start import PoolStart

T = TypeVar("T")

POLL_S = 0.1
WATCH_S = 1.0
STOP_LIMIT_S = 8.0
STOP_BUSY_LIMIT_S = 2.0  # while Ray still starts or stops something
ROOM_LIMIT_S = 30.0  # a worker whose process has not begun by then has no room, or a slow machine
GATEWAY_LIMIT_S = 60.0  # from a ready worker to an answer over HTTP


class Refused(ConfigurationError):
    """The cluster's nodes cannot run what was asked; nothing was started there."""


def serve(request: ServeRequest, view: ServeView) -> int:
    """Serve until a signal comes; the exit code. 2: refused before anything started. 1: the start
    failed.
    """
    try:
        host, port = listen.claim(request.where.host, request.where.port)
        request = replace(request, fleet=absolute(request.fleet))
        ray, fleet = _choose_ray(request, view)
        ray.prepare()
    except ConfigurationError as error:
        view.refuse(error)
        return 2
    return Session(replace(request, fleet=fleet), ray, view).run(host, port)


class Session:
    """What runs between the first process started and the last one ended."""

    def __init__(self, request: ServeRequest, ray: LocalRay | NamedRay, view: ServeView) -> None:
        self._request = request
        self._fleet = request.fleet  # with every pool and its CPUs, once the nodes are known
        self._ray = ray
        self._view = view
        # One thread for all of Ray: its processes end when the thread that started them does.
        self._thread = ThreadPoolExecutor(1, "ray")
        self._deployment: Deployment | None = None
        self._busy: Future[Any] | None = None  # the last call into Ray
        self._is_serving = False

    def run(self, host: str, port: int) -> int:
        """Start, watch, stop; the exit code."""
        code = 0
        with Interrupts(on_second=self._give_up) as interrupts, _chatter_to(self._ray.chatter):
            try:
                self._start(interrupts, host, port)
                names = [str(model.name) for model in self._fleet.models]
                tls = self._request.where.tls
                url = listen.url(host, port, is_tls=tls is not None)
                self._view.ready(
                    url,
                    names,
                    listen.warning(host, port),
                    needs_key=not self._fleet.auth.is_open,
                )
                self._is_serving = True
                for note in exposure_notes(self._fleet.auth, host, is_tls=tls is not None):
                    self._view.note(note)
                self._watch(interrupts)
            except StopAsked:
                self._view.stopping(self._ray.is_ours)
            except PolypathError as error:
                code = 2 if isinstance(error, Refused) else 1
                self._view.error(str(error), logs=self._ray.logs)
            except Exception:  # the process's edge; a hanging stop would leave without a word
                code = 1
                fault = f"a fault of ours:\n{traceback.format_exc()}"
                self._view.error(fault, logs=self._ray.logs)
            finally:
                self._stop(code)
        return code

    def _start(self, interrupts: Interrupts, host: str, port: int) -> None:
        self._view.stage("ray", self._ray.name)
        if isinstance(named := self._ray, NamedRay):  # it is there: first whether there is room
            self._fleet = self._call(interrupts, lambda: self._check_nodes(named))
        started = self._busy = self._thread.submit(self._ray.start)
        if isinstance(self._ray, NamedRay):
            interrupts.wait_for(started)
            interrupts.renew()
            self._call(interrupts, self._ray.claim)
        with paused():
            from .deploy import Deployment  # imports Serve and FastAPI while Ray starts

            interrupts.wait_for(started)
        interrupts.renew()
        self._ray.watch()
        self._view.stage("serve", "")
        self._deployment = deployment = Deployment(self._fleet)
        self._call(interrupts, lambda: deployment.submit(host, port, self._request.where.tls))
        self._await_ready(interrupts, deployment)

    def _check_nodes(self, ray: NamedRay) -> FleetSpec:
        """Whether the cluster has a place for every worker, before it is joined. Raises Refused."""
        try:
            nodes = [*ray.look(), *self._request.launcher_types()]
            checked = check_cluster(self._fleet, nodes, is_head_here=self._request.is_head_here)
        except ConfigurationError as error:
            raise Refused(str(error)) from error
        for model in checked.fleet.models:
            if model.auto_pools:
                self._view.derived(model)
        return checked.fleet

    def _await_ready(self, interrupts: Interrupts, deployment: Deployment) -> None:
        from .deploy import StartFailed

        self._view.stage("worker", "")
        ready_since: float | None = None
        began, is_told = time.monotonic(), False
        while True:
            progress = self._call(interrupts, deployment.progress)
            self._ray.watch()
            self._view.progress(progress.pools)
            if not is_told and time.monotonic() - began > ROOM_LIMIT_S:
                is_told = True
                for pool in progress.pools:
                    if pool.num_missing:
                        self._view.note(_waiting(pool))
            if progress.failure:
                raise StartFailed(progress.failure)
            for pool in progress.pools:
                if pool.died_in is not None:
                    raise StartFailed(_died(pool))
            if progress.is_serving:
                return
            if progress.is_ready:
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
        life = WorkerLife(self._deployment.pools())
        while True:
            interrupts.sleep(WATCH_S)
            self._ray.watch()
            for sentence in life.changes(self._pools(interrupts, self._deployment)):
                self._view.note(sentence)

    def _pools(self, interrupts: Interrupts, deployment: Deployment) -> list[PoolStart]:
        """The workers' records; a Ray that has ended while it is asked is found out."""
        self._busy = asked = self._thread.submit(deployment.pools)
        looked_s = time.monotonic()
        while not asked.done():
            interrupts.sleep(0.02)
            if time.monotonic() - looked_s > WATCH_S:
                self._ray.watch()
                looked_s = time.monotonic()
        if asked.exception() is not None:
            self._ray.watch()
        return asked.result()

    def _call(self, interrupts: Interrupts, function: Callable[[], T]) -> T:
        """Call into Ray on its thread, with signals heard meanwhile."""
        self._busy = future = self._thread.submit(function)
        return interrupts.wait_for(future)

    def _stop(self, code: int) -> None:
        """Orderly, unless Ray is in the middle of something or hangs: nothing of ours may stay."""
        stopped = self._thread.submit(self._end, code)
        limit_s = STOP_LIMIT_S
        if self._busy is not None and not self._busy.done() and not self._is_serving:
            limit_s = STOP_BUSY_LIMIT_S
        done, _ = wait([stopped], timeout=limit_s)
        self._view.close()
        if not done:
            self._ray.kill()
            _leave(code)
        self._thread.shutdown()
        stopped.result()

    def _end(self, code: int) -> None:
        """On Ray's thread. A Ray that stays takes the application out by itself, drained; ours goes
        with it, so its clients are told first.
        """
        if self._ray.is_ours and self._is_serving and self._deployment is not None:
            self._deployment.say_goodbye()
        self._ray.stop(keep_logs=code != 0)

    def _give_up(self) -> None:
        self._view.close()
        self._ray.kill()
        _leave(130)


def _choose_ray(request: ServeRequest, view: ServeView) -> tuple[LocalRay | NamedRay, FleetSpec]:
    """The Ray to use, and what it will run. For our own Ray everything is checked, and the plans
    are made and shown, here.
    """
    where, fleet = request.where, request.fleet
    if where.address is not None:
        view.title(", ".join(model.name or model.model for model in fleet.models))
        return NamedRay(where.address, where.address_origin), fleet
    checked = check_own_ray(fleet)
    environment: dict[str, str] = {}
    for planned in checked.planned:
        view.plan(planned, is_described=fleet.is_described)
        environment |= planned.plan.environment
    ray = LocalRay(
        num_cpus=checked.num_cpus,
        num_gpus=checked.num_gpus,
        environment=environment,
        starts_worker=any(pool.num_workers for _, pool in checked.fleet.pools()),
    )
    return ray, checked.fleet


def _waiting(pool: PoolStart) -> str:
    return (
        f"{pool.title}: {pool.num_missing} of {pool.num_workers} workers have not begun after "
        f"{ROOM_LIMIT_S:.0f} s; Ray finds no room for them yet, or their nodes are still coming"
    )


def _died(pool: PoolStart) -> str:
    return (
        f"{pool.title}'s process died during {pool.died_in} without a word; is there enough memory?"
    )


@contextmanager
def _chatter_to(file: Path) -> Iterator[None]:
    """Send to a file what Ray and Serve print in this process; the view has the terminal."""
    log = file.open("a")  # never closed: what Ray imports here keeps it until the process ends
    with redirect_stdout(log), redirect_stderr(log):
        yield


def _leave(code: int) -> None:
    os._exit(code)
