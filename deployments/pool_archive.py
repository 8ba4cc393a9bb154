"""Keeps what gateways know of pools without a worker (pool_memory.py) where those find it that come
later: small records in Ray's key-value store, which no gateway's end takes with it.

A record is of one edition of a pool's options, so that after an update nobody asks for the old one.
Gateways renew theirs; one that nobody renewed for `FORGOTTEN_S` is of an application that is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ray.exceptions import RayError

from ..runtime.errors import EngineError
from .head_calls import HeadCalls
from .served_worker import Worker

if TYPE_CHECKING:
    from ..runtime.request import Request, RequestOutput
    from .pool_memory import PoolMemory
    from .served_model import ServedModel

logger = logging.getLogger("polypath.pools")

LOOK_S = 1.0  # a worker that was met is written down so soon
ASK_S = 5.0  # for pools that other gateways may have met meanwhile
RENEW_S = 30.0  # with the newest speeds
FORGOTTEN_S = 300.0
START_S = 5.0  # a store that is silent for longer keeps no gateway from its start
NAMESPACE, PREFIX = "polypath", "pools"
KEPT = {  # of a description: what `Worker` reads
    *("worker_id", "model", "fingerprint", "path", "plan", "calibration", "pool", "edition"),
    *("max_model_len", "vocab_size", "max_num_seqs", "max_waiting"),
    *("labels", "features", "batch_invariant"),
}
FAULTS = (RayError, RuntimeError, OSError, ValueError, KeyError)  # of a store that is away, or lies


class Store(Protocol):
    """Texts by key; blocks."""

    def read(self, key: str) -> str | None: ...

    def write(self, key: str, text: str) -> None: ...

    def keys(self, prefix: str) -> list[str]: ...

    def delete(self, key: str) -> None: ...


class RayStore:
    """Ray's key-value store, on its head."""

    def read(self, key: str) -> str | None:
        from ray.experimental.internal_kv import _internal_kv_get

        text = _internal_kv_get(key, namespace=NAMESPACE)
        return None if text is None else text.decode()

    def write(self, key: str, text: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(key, text.encode(), True, namespace=NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        from ray.experimental.internal_kv import _internal_kv_list

        return [key.decode() for key in _internal_kv_list(prefix, namespace=NAMESPACE)]

    def delete(self, key: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(key, namespace=NAMESPACE)


class GoneLink:
    """Of a worker that is remembered only."""

    kind = "gone"

    async def describe(self) -> dict[str, Any]:
        raise _gone()

    async def stats(self) -> dict[str, Any]:
        raise _gone()

    def load(self) -> None:
        return None

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        raise _gone()
        yield

    async def cancel(self, request_id: str) -> None:
        raise _gone()

    async def hold(self, is_held: bool) -> None:
        raise _gone()


def _gone() -> EngineError:
    return EngineError("the worker is gone; only what it was like is known")


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What this gateway last wrote of a pool."""

    worker_id: str
    at_s: float


class PoolArchive:
    """One gateway's end of the records of an application. `start` it before the first request."""

    def __init__(
        self,
        app: str,
        models: Mapping[str, ServedModel],
        store: Store,
        clock: Callable[[], float] = time.time,  # that nodes agree on, but for minutes
    ) -> None:
        self._prefix = f"{PREFIX}/{app}/"
        self._models = models
        self._store = store
        self._clock = clock
        self._written: dict[str, Written] = {}
        self._task: asyncio.Task[None] | None = None
        self._calls = HeadCalls("pools")

    async def start(self) -> None:
        """Take over what others left, and keep it from then on."""
        try:
            async with asyncio.timeout(START_S):
                await self._safely(self._sweep)
                await self.recall()
        except TimeoutError:
            logger.warning("Ray's store is silent: nothing is remembered of pools that sleep")
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Write nothing more."""
        if self._task is not None:
            self._task.cancel()
        self._calls.close()

    async def _run(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            looks += 1
            await self.keep()
            if looks % int(ASK_S / LOOK_S) == 0:
                await self.recall()

    async def recall(self) -> None:
        """Of every pool that this gateway knows no worker of, the last one that another met."""
        for key, model, pool in self._pools():
            if pool.last is None:
                record = await self._safely(self._read, key)
                if record and pool.last is None:  # or one came meanwhile
                    worker = Worker.of(GoneLink(), record["worker"])
                    model.recall(worker, tuple(record["speeds"]))
                    logger.info("pool %s is remembered as %s was", pool.name, worker.id)

    async def keep(self) -> None:
        """Write what is new, and renew the rest now and then."""
        now_s = self._clock()
        for key, model, pool in self._pools():
            last, before = pool.last, self._written.get(key)
            if last is None:
                continue
            if before and before.worker_id == last.id and now_s - before.at_s < RENEW_S:
                continue
            worker = {name: value for name, value in last.description.items() if name in KEPT}
            speeds = model.pool_speeds(pool.name)
            text = json.dumps({"worker": worker, "speeds": speeds, "renewed_s": now_s})
            if await self._safely(self._write, key, text):
                self._written[key] = Written(worker_id=last.id, at_s=now_s)

    def _pools(self) -> Iterator[tuple[str, ServedModel, PoolMemory]]:
        for name, model in self._models.items():
            for pool in model.pools:
                yield f"{self._prefix}{name}/{pool.name}/{pool.edition}", model, pool

    def _read(self, key: str) -> dict[str, Any] | None:  # JSON
        text = self._store.read(key)
        record = None if text is None else json.loads(text)
        is_known = record is not None and self._clock() - record["renewed_s"] < FORGOTTEN_S
        return record if is_known else None

    def _write(self, key: str, text: str) -> bool:
        self._store.write(key, text)
        return True

    def _sweep(self) -> None:
        """Delete what is forgotten: records of older editions and of applications long gone."""
        for key in self._store.keys(self._prefix):
            if self._read(key) is None:
                self._store.delete(key)

    async def _safely(self, function: Callable[..., Any], *args: object) -> Any:  # what it returns
        """On another thread; None when the store cannot do it now."""
        try:
            return await self._calls.ask(function, *args)
        except FAULTS as error:
            logger.debug("the records of pools cannot be used now: %s", error)
            return None


def forget(app: str, store: Store | None = None) -> None:
    """The application is gone, and so is what was known of its pools."""
    store = store or RayStore()
    for key in store.keys(f"{PREFIX}/{app}/"):
        store.delete(key)
