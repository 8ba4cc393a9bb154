"""A process that acts as one gateway towards the ledger of API keys; tests write to its input.

`enter N LIMIT` asks N times at once and prints how many got in; `kill` ends the ledger's actor.
"""

from __future__ import annotations

import asyncio
import sys

import ray

from polypath.deployments.ledger import KeyLimits, Standing
from polypath.deployments.ledger_actor import connect_ledger
from polypath.deployments.ledger_shared import SharedLedger


async def _main(address: str, name: str) -> None:
    ray.init(address=address, log_to_driver=False)
    ledger = SharedLedger(name, connect_ledger)
    await ledger.start()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["enter", key, count, limit]:
                limits = KeyLimits(requests_per_minute=int(limit))
                asked = (ledger.enter(key, limits) for _ in range(int(count)))
                answers = await asyncio.gather(*asked)
                print(sum(isinstance(answer, Standing) for answer in answers), flush=True)
            case ["running", key]:
                print((await ledger.standing(key)).running, flush=True)
            case ["kill"]:
                ray.kill(connect_ledger())
                print("killed", flush=True)
            case other:
                raise AssertionError(other)
    ledger.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2]))
