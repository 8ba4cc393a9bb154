"""Prefill and decode rates of a running server, over HTTP, on the workloads of `polypath bench
engine`.

    .venv/bin/python benchmarks/http_rates.py --url http://127.0.0.1:8000 --batch 1 --batch 8

Prompts are random token ids, answers are greedy and streamed; rates count tokens as
runtime/bench.py does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from urllib.parse import SplitResult, urlsplit


async def stream(url: SplitResult, body: dict[str, object]) -> tuple[float, float, int]:
    """Time of the first and the last token, and how many tokens the server counted.

    By hand and not with an HTTP library: on a machine that the model fills, what a client library
    costs for each chunk is taken from the model.
    """
    assert url.hostname is not None, "main has checked it"
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 80)
    writer.write(head.encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{url.netloc} answers {(status + await reader.read()).decode()}")
    first = last = 0.0
    tail = b""
    while part := await reader.read(65536):
        if b'"text":' in part:
            last = time.perf_counter()
            first = first or last
        tail = (tail + part)[-4096:]
    writer.close()
    count = tail[tail.rindex(b'"completion_tokens":') :].split(b":")[1]
    return first, last, int(re.match(rb"\d+", count)[0])  # type: ignore[index]  # it is a number


async def run(url: str, model: str, batch: int, prompt: int, new: int) -> tuple[float, float]:
    """(prefill, decode) tokens/s of one round of `batch` streams started together."""
    body: dict[str, object] = {
        "model": model,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompts = [[random.randrange(3, 49_000) for _ in range(prompt)] for _ in range(batch)]
    start = time.perf_counter()
    done = await asyncio.gather(*(stream(urlsplit(url), body | {"prompt": p}) for p in prompts))
    firsts, lasts = max(d[0] for d in done), max(d[1] for d in done)
    decoded = sum(d[2] - 1 for d in done)
    return batch * prompt / (firsts - start), decoded / (lasts - firsts) if new > 1 else 0.0


def main() -> None:
    """Print one line a workload: medians over the repeats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    points = [(1, n, 1) for n in args.prefill or [512]]
    points += [(n, args.prompt_tokens, args.new_tokens) for n in args.batch or [1, 8]]
    asyncio.run(run(args.url, args.model, 1, 16, 4))  # first touches
    for batch, prompt, new in points:
        runs = [
            asyncio.run(run(args.url, args.model, batch, prompt, new)) for _ in range(args.repeats)
        ]
        prefill, decode = (statistics.median(r) for r in zip(*runs, strict=True))
        print(
            f"batch {batch}, {prompt} + {new}: prefill {prefill:.1f}, decode {decode:.1f} tokens/s"
        )


if __name__ == "__main__":
    main()
