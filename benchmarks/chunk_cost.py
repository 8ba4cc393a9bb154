"""CPU time that one streamed chunk costs between the engine and the client's socket.

    .venv/bin/python benchmarks/chunk_cost.py --way road

Eight streams of an engine whose steps sleep 20 ms: 400 chunks a second. Worker and gateway are
processes of their own, as they are on a cluster; the client is not counted, and neither is what the
two cost when nothing streams. Ways: `local` (gateway and worker in one process), `road`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import uvicorn

from polypath.actors.link import LocalLink, WorkerLink
from polypath.actors.road_address import RoadAddress
from polypath.actors.road_link import RoadLink
from polypath.actors.road_server import RoadServer
from polypath.deployments.gateway import Gateway
from polypath.deployments.routes import build_api
from polypath.runtime.checkpoint.source import default_model, open_checkpoint
from polypath.tests.paced_worker import PacedWorker

STREAMS, STEP_S = 8, 0.02
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. "


def cpu_s() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def answer(pipe: Connection, worker: PacedWorker | None) -> None:
    """Answer `cpu` with the CPU time so far, without that of the engine's pretence, and `first`
    with the time of the last request's first token, until `stop`.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        question = pipe.recv()
        if question == "stop":
            loop.remove_reader(pipe.fileno())
            return
        if question == "first":
            pipe.send(worker.paced.first_token_s if worker else 0.0)
        else:
            pipe.send(cpu_s() - (worker.paced.step_cpu_s if worker else 0.0))


def make_worker(step_s: float) -> PacedWorker:
    """Says `TEXT` over and over."""
    says = open_checkpoint(default_model(), weights=False).tokenizer().encode(TEXT)
    worker = PacedWorker(list(says), step_s, max_num_seqs=64, max_waiting=64)
    worker.start()
    return worker


def worker_process(pipe: Connection, step_s: float) -> None:
    async def serve() -> None:
        worker = make_worker(step_s)
        server = RoadServer(worker)
        pipe.send((await server.start()).to_json())
        await answer(pipe, worker)
        await server.close()
        worker.stop()

    _run(serve())


def gateway_process(pipe: Connection, offer: dict[str, Any] | None, step_s: float) -> None:
    async def serve() -> None:
        gateway = Gateway()
        gateway.add_checkpoint(open_checkpoint(default_model(), weights=False), name="tiny")
        worker = make_worker(step_s) if offer is None else None
        link: WorkerLink
        if worker is not None:
            link = LocalLink(worker)
        else:
            assert offer is not None, "one of the two"
            link = await RoadLink.connect(RoadAddress.from_json(offer), "bench")
        await gateway.add_worker(link)
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(build_api(gateway), log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        pipe.send(listening.getsockname()[1])
        await answer(pipe, worker)
        server.should_exit = True
        await serving
        gateway.close()
        if worker is not None:
            worker.stop()

    _run(serve())


def _run(work: Any) -> None:  # a coroutine
    import uvloop  # Ray runs its actors on it too

    uvloop.run(work)


async def read_stream(port: int, num_tokens: int) -> tuple[int, float]:
    """SSE events of one streamed chat, and when the first with text came (monotonic clock)."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": num_tokens,
            "stream": True,
            "temperature": 0,
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    )
    events, first_s = 0, 0.0
    while data := await reader.read(65536):
        if not first_s and b'"content":' in data:
            first_s = time.monotonic()
        events += data.count(b"data: ")
    writer.close()
    return events, first_s


async def measure(port: int, asks: dict[str, Callable[[], float]], args: argparse.Namespace) -> str:
    """One run: idle, then streams; milliseconds of CPU per chunk by process."""
    await asyncio.gather(*(read_stream(port, 8) for _ in range(STREAMS)))  # first touches
    before = {name: ask() for name, ask in asks.items()}
    await asyncio.sleep(args.idle)
    idle = {name: (ask() - before[name]) / args.idle for name, ask in asks.items()}
    num_tokens = int(args.seconds / args.step)
    before = {name: ask() for name, ask in asks.items()}
    began = time.monotonic()
    streams = (read_stream(port, num_tokens) for _ in range(args.streams))
    events = sum(count for count, _ in await asyncio.gather(*streams))
    wall = time.monotonic() - began
    used = {name: ask() - before[name] - idle[name] * wall for name, ask in asks.items()}
    parts = ", ".join(f"{name} {used[name] / events * 1000:.3f}" for name in asks)
    total = sum(used.values()) / events * 1000
    rest = ", ".join(f"{name} {idle[name] * 1000:.1f}" for name in asks)
    return (
        f"{events / wall:.0f} chunks/s: {total:.3f} ms of CPU a chunk ({parts}); "
        f"idle, taken off: {rest} ms a second"
    )


async def first_chunks(port: int, ask: Callable[[], float], count: int = 30) -> str:
    """How long after its step the first chunk is at the client, over requests one by one."""
    delays = []
    for _ in range(count):
        _, seen_s = await read_stream(port, 2)
        delays.append((seen_s - ask()) * 1000)
    delays.sort()
    return (
        f"first chunk after its step: median {statistics.median(delays):.1f}, "
        f"largest of {count} {delays[-1]:.1f} ms"
    )


def asker(pipe: Connection, question: str) -> Callable[[], float]:
    """A function that asks a process."""

    def ask() -> float:
        pipe.send(question)
        return pipe.recv()

    return ask


def main() -> None:
    """Print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--way", choices=["local", "road"], default="road")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--idle", type=float, default=3.0)
    parser.add_argument("--step", type=float, default=STEP_S)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = {}, []
    offer = None
    if args.way == "road":
        ours["worker"], far = spawn.Pipe()
        theirs.append(spawn.Process(target=worker_process, args=(far, args.step)))
        theirs[-1].start()
        offer = ours["worker"].recv()
    ours["gateway"], far = spawn.Pipe()
    theirs.append(spawn.Process(target=gateway_process, args=(far, offer, args.step)))
    theirs[-1].start()
    port = ours["gateway"].recv()

    asks = {name: asker(pipe, "cpu") for name, pipe in ours.items()}
    print(f"{args.way}, {args.streams} streams, a step every {args.step * 1000:g} ms")
    for _ in range(args.repeats):
        print(asyncio.run(measure(port, asks, args)), flush=True)
    first = asker(ours.get("worker", ours["gateway"]), "first")
    print(asyncio.run(first_chunks(port, first)), flush=True)
    for pipe in ours.values():
        pipe.send("stop")
    for process in theirs:
        process.join(10)


if __name__ == "__main__":
    main()
