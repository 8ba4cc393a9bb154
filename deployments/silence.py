"""Notices a worker that went silent in the middle of an answer: suspended, or on a node that was
lost without a word. A long step is not that: the worker still answers for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..runtime.errors import EngineError

if TYPE_CHECKING:
    from .api_settings import ApiSettings
    from .served_worker import Worker


class Silence:
    """Asks the worker how it is whenever nothing was heard for a while."""

    def __init__(self, worker: Worker, settings: ApiSettings, scope: asyncio.Timeout) -> None:
        self._worker = worker
        self._settings = settings
        self._scope = scope
        self._is_heard = False
        self._loop = asyncio.get_running_loop()
        self._asking: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(settings.silence_s, self._look)

    def heard(self) -> None:
        """Something came."""
        self._is_heard = True

    def stop(self) -> None:
        """The answer went on or ended."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look(self) -> None:
        if not self._is_heard:
            self._asking = self._loop.create_task(self._ask())
            return
        self._is_heard = False
        self._timer = self._loop.call_later(self._settings.silence_s, self._look)

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(self._settings.stats_timeout_s):
                stats = await self._worker.link.stats()
            is_alive = stats["heartbeat_age_s"] <= self._settings.heartbeat_limit_s
        except (TimeoutError, EngineError):
            is_alive = False
        if is_alive or self._is_heard:
            self._timer = self._loop.call_later(self._settings.silence_s, self._look)
        else:
            self._scope.reschedule(self._loop.time())


@asynccontextmanager
async def noticed(worker: Worker, settings: ApiSettings) -> AsyncIterator[Silence]:
    """What runs inside is interrupted with an EngineError when the worker no longer answers."""
    scope = asyncio.timeout(None)
    try:
        async with scope:
            silence = Silence(worker, settings, scope)
            try:
                yield silence
            finally:
                silence.stop()
    except TimeoutError:
        if not scope.expired():
            raise
        raise EngineError(f"{worker.id} has gone silent and does not answer") from None
