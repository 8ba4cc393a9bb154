"""A program: two replicas of a tiny worker on a Ray of its own, all checks of links on each.

Prints a line for each check that holds, `who REPLICA WORKER` for each replica, and `secret REPLICA`
when the key of its road is in no log.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from polypath.deployments.fleet import PoolSpec
from polypath.deployments.ray_local import LocalRay
from polypath.runtime.config import EngineConfig
from polypath.tests.link_checks import CHECKS, name_of

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


async def check_links(handle: DeploymentHandle, logs: Path | None) -> None:
    from polypath.actors.handle_link import HandleLink
    from polypath.deployments.replicas import BOARD, Replica

    found: list[tuple[Replica, ...]] = []
    BOARD.watch(str(handle.deployment_id), found.append)
    offers = await first_offers(handle)
    replicas = {replica.id: replica.metadata for replica in found[-1]}
    assert {offer["replica"] for offer in offers} == set(replicas)
    links = {name: HandleLink(handle, name) for name in replicas}
    for name, link in links.items():
        said = await link.describe()
        assert said["worker_id"] == replicas[name]["worker_id"]
        assert replicas[name]["road"]["key"]
        print("who", name, said["worker_id"], flush=True)
    many = [(name, link.stats()) for name, link in links.items() for _ in range(8)]
    answers = await asyncio.gather(*(asked for _, asked in many))
    for (name, _), answer in zip(many, answers, strict=True):
        assert answer["worker_id"] == replicas[name]["worker_id"], "a call reached another replica"
    for check in CHECKS:
        for name, link in links.items():
            await check(link)
            print("held", name_of(check), name, flush=True)
    assert logs is not None and len(list(logs.rglob("*"))) > 5
    for name, metadata in replicas.items():
        key = metadata["road"]["key"].encode()
        for path in logs.rglob("*"):
            assert not path.is_file() or key not in path.read_bytes(), f"a road's key is in {path}"
        print("secret", name, flush=True)


async def first_offers(handle: DeploymentHandle) -> list[dict[str, object]]:
    """A router starts at the first call, and looks its replicas up on a thread of its own."""
    from ray.serve.exceptions import DeploymentUnavailableError

    async with asyncio.timeout(30):
        while True:
            with suppress(DeploymentUnavailableError):
                return await handle.broadcast("offer").results_async()
            await asyncio.sleep(0.1)


def main(model: str) -> int:
    ray = LocalRay(num_cpus=2, num_gpus=0, environment={})
    ray.prepare()
    ray.start()
    try:
        from ray import serve

        from polypath.deployments.pool import worker_deployment

        engine = EngineConfig(
            model=model, served_model_name="tiny", max_num_seqs=2, max_waiting=2, max_model_len=512
        )
        pool = PoolSpec(engine=engine, num_workers=2, num_cpus=0.5, max_running=4)
        serve.start(proxy_location="Disabled")
        handle = serve.run(worker_deployment(pool), name="links", route_prefix=None)
        asyncio.run(check_links(handle, ray.logs))
        return 0
    except Exception:  # the edge of the program
        traceback.print_exc()
        return 1
    finally:
        ray.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
