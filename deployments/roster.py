"""Keeps a gateway's list of workers true: notices when the worker behind a link was replaced, is
gone, or is back.
"""

from __future__ import annotations

import asyncio

from ..actors.link import WorkerLink
from ..runtime.errors import EngineError
from .gateway import Gateway

SEARCH_S = 0.2  # while there is no worker
WATCH_S = 1.0


async def follow(gateway: Gateway, link: WorkerLink) -> None:
    """Until cancelled: add the worker behind `link` when it answers, drop it when it does not."""
    known: str | None = None
    while True:
        known = await update(gateway, link, known)
        await asyncio.sleep(WATCH_S if known else SEARCH_S)


async def update(gateway: Gateway, link: WorkerLink, known: str | None) -> str | None:
    """One look: the id of the worker that the gateway now uses through this link, if any."""
    try:
        answering = (await link.stats())["worker_id"]
        if answering == known:
            return known
        if known is not None:
            gateway.remove_worker(known)
        return (await gateway.add_worker(link)).id
    except EngineError:
        if known is not None:
            gateway.remove_worker(known)
        return None
