"""The same as chunk_cost.py on Ray Serve, with Serve's handle and proxy as they are without a road.

    .venv/bin/python benchmarks/serve_cost.py --link handle --front serve

Prints CPU time per streamed chunk of each process; the client, the engine's pretence and what the
processes cost when nothing streams are taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from typing import Any

import psutil

from polypath.benchmarks.chunk_cost import STREAMS, TEXT, read_stream
from polypath.deployments.fleet import FleetSpec, ModelSpec, PoolSpec
from polypath.deployments.ray_local import LocalRay
from polypath.runtime.checkpoint.source import default_model, open_checkpoint
from polypath.runtime.config import EngineConfig
from polypath.tests.ray.test_named_cluster import free_port

ROLES = {"ServeReplica:polypath:worker": "worker", "ServeReplica:polypath:gateway": "gateway"}
ROLES["ProxyActor"] = "proxy"


def paced_replica(says: list[int], step_s: float, *, has_road: bool) -> type:
    """A worker's deployment class over an engine that sleeps."""
    from ray import serve

    from polypath.actors.road_server import RoadServer
    from polypath.deployments.pool import WorkerReplica
    from polypath.tests.paced_worker import PacedWorker

    class PacedReplica(WorkerReplica):
        async def __init__(self) -> None:
            self._replica = serve.get_replica_context().replica_id.unique_id
            self._worker = PacedWorker(says, step_s, max_num_seqs=64, max_waiting=64)
            self._worker.start()
            self._road = RoadServer(self._worker)
            self._offer = (await self._road.start()).to_json() if has_road else None

    return PacedReplica


def submit(args: argparse.Namespace, port: int) -> None:
    """Start Serve with one worker and one gateway."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from polypath.deployments.app import GatewayReplica
    from polypath.deployments.front import FrontAddress
    from polypath.deployments.replica_router import ROUTER

    checkpoint = open_checkpoint(default_model(), weights=False)
    says = list(checkpoint.tokenizer().encode(TEXT))
    replica = paced_replica(says, args.step, has_road=args.link == "road")
    engine = EngineConfig(model=default_model(), served_model_name="tiny")
    model = ModelSpec(
        model=default_model(), name="tiny", engine=engine, pools=(PoolSpec(engine=engine),)
    )
    node_id = ray.get_runtime_context().get_node_id()
    front = (
        FrontAddress(host="127.0.0.1", port=port, node_id=node_id) if args.front == "own" else None
    )
    location = "Disabled" if front else "HeadOnly"
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(
        proxy_location=location,
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        logging_config=quiet,
    )
    worker = serve.deployment(
        name="worker",
        max_ongoing_requests=200,
        ray_actor_options={"num_cpus": 0.5},
        request_router_config={"request_router_class": ROUTER},
    )(replica)
    gateway = serve.deployment(
        name="gateway", max_ongoing_requests=500, ray_actor_options={"num_cpus": 0.25}
    )(GatewayReplica)
    app = gateway.bind(FleetSpec(models=(model,)), {"worker": worker.bind()}, front)
    serve.run(app, name="polypath", route_prefix=None if front else "/", logging_config=quiet)


def cpu_s() -> dict[str, float]:
    """CPU time so far, by role."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        for mark, role in ROLES.items():
            if mark in line:
                times = process.cpu_times()
                found[role] += times.user + times.system
    return dict(found)


async def measure(port: int, args: argparse.Namespace) -> str:
    """One run: idle, then streams."""
    await asyncio.gather(*(read_stream(port, 8) for _ in range(STREAMS)))
    before = cpu_s()
    await asyncio.sleep(args.idle)
    idle = {role: (used - before[role]) / args.idle for role, used in cpu_s().items()}
    before, began = cpu_s(), time.monotonic()
    num_tokens = int(args.seconds / args.step)
    streams = (read_stream(port, num_tokens) for _ in range(STREAMS))
    events = sum(count for count, _ in await asyncio.gather(*streams))
    wall_s = time.monotonic() - began
    used = {role: now - before[role] - idle[role] * wall_s for role, now in cpu_s().items()}
    parts = ", ".join(f"{role} {used[role] / events * 1000:.3f}" for role in sorted(used))
    rest = ", ".join(f"{role} {idle[role] * 1000:.1f}" for role in sorted(idle))
    total = sum(used.values()) / events * 1000
    return (
        f"{events / wall_s:.0f} chunks/s: {total:.3f} ms of CPU a chunk ({parts}); "
        f"idle, taken off: {rest} ms a second"
    )


def main() -> None:
    """Print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--link", choices=["handle", "road"], default="handle")
    parser.add_argument("--front", choices=["serve", "own"], default="serve")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--idle", type=float, default=3.0)
    parser.add_argument("--step", type=float, default=0.02)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    local: Any = LocalRay(num_cpus=2, num_gpus=0, environment={})
    local.prepare()
    local.start()
    try:
        port = free_port()
        submit(args, port)
        print(f"link {args.link}, front {args.front}")
        for _ in range(args.repeats):
            print(asyncio.run(measure(port, args)), flush=True)
    finally:
        local.stop()


if __name__ == "__main__":
    main()
