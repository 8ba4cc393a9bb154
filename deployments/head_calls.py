"""Blocking calls to Ray's head, on a thread of their own and for a limited time.

A head that is busy, or away, keeps a call waiting for a minute. On asyncio's shared threads, which
read large bodies too, a few of those would keep every large request waiting as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LIMIT_S = 2.0

Args = ParamSpec("Args")
Result = TypeVar("Result")


class HeadCalls:
    """One call after another."""

    def __init__(self, name: str, limit_s: float | None = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"head {name}")

    async def ask(
        self, function: Callable[Args, Result], *args: Args.args, **options: Args.kwargs
    ) -> Result:
        """What `function` returns. Raises what it raises, and TimeoutError after the limit: one
        that has not begun by then is not made, one that has goes on unseen.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limit_s):
            return await loop.run_in_executor(self._thread, lambda: function(*args, **options))

    def close(self) -> None:
        """Make no more calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)
