"""A gateway over HTTP with paced workers in its process, for `polypath bench routing`.

    .venv/bin/python benchmarks/paced_server.py 0.04 0.16 0.16 0.16     # seconds of each one's step

Prints its URL and serves until it is stopped. Each worker runs 8 requests at once.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.tests.http.live import live_server
from polypath.tests.paced import PacedLink
from polypath.tests.tiny_models import random


async def serve(steps_s: list[float]) -> None:
    """Until cancelled."""
    gateway = Gateway(ApiSettings(compares_policies=True, max_queued=10_000))
    with tempfile.TemporaryDirectory() as folder:
        random(Path(folder) / "tiny")
        gateway.add_checkpoint(open_checkpoint(str(Path(folder) / "tiny")), name="tiny")
    for number, step_s in enumerate(steps_s):
        await gateway.add_worker(PacedLink(f"worker-{number}", step_s, max_waiting=10_000))
    async with live_server(gateway) as url:
        print(url, flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(serve([float(step_s) for step_s in sys.argv[1:]]))
