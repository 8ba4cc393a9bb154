"""A Ray of several unlike nodes on this one machine, in a process of its own.

Run as a program it starts the nodes that its JSON argument lists, prints the address, and ends them
when its input ends.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MARKS = "POLYPATH_TESTS_MARKS"  # of a folder whose files tell workers when to die
OBJECT_STORE_BYTES = 80 * 1024 * 1024
NodeArguments = Mapping[str, Any]  # of ray.cluster_utils.Cluster.add_node


@dataclass(frozen=True, slots=True)
class LabelledCluster:
    """Its address, and the environment in which a process may join it."""

    address: str
    environment: dict[str, str]
    pid: int  # of the process above all its nodes


@contextmanager
def labelled_cluster(
    nodes: Sequence[NodeArguments], **environment: str
) -> Iterator[LabelledCluster]:
    """The nodes, the first one as head, until the block ends; all that runs there has
    `environment`.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} | environment
    patience = {"RAY_raylet_start_wait_time_s": "120"}  # tests run on busy machines
    process = subprocess.Popen(
        [sys.executable, "-m", "polypath.tests.ray.labelled_cluster", json.dumps(list(nodes))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | token | patience,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None, "pipes were asked for"
    try:
        line = next((line for line in process.stdout if line.startswith("address ")), "")
        assert line, f"the cluster did not start: exit code {process.wait(30)}"
        yield LabelledCluster(line.split()[1], token, process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()


def _main(nodes: list[dict[str, Any]]) -> None:
    import ray
    from ray.cluster_utils import Cluster

    for node in nodes:
        node["object_store_memory"] = OBJECT_STORE_BYTES
    cluster = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
    try:
        for node in nodes[1:]:
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        print("address", cluster.address, flush=True)
        sys.stdin.read()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
