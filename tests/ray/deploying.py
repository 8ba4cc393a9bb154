"""A program that deploys Ray's own kind of config to a cluster: one JSON document for each line of
its input, `deployed` for each that Serve took. Everything ends with the cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polypath.tests.ray.labelled_cluster import LabelledCluster


class Deployer:
    """Its process, which stays connected to the cluster."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def deploy(self, config: dict[str, Any]) -> None:  # as in Ray's file
        """Hand a config over; what it asks for is there some time later."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(config) + "\n")
        self._process.stdin.flush()
        lines = iter(self._process.stdout.readline, "")
        assert any(line == "deployed\n" for line in lines), "it ended without a word"


@contextmanager
def deploying(cluster: LabelledCluster) -> Iterator[Deployer]:
    process = subprocess.Popen(
        [sys.executable, "-m", "polypath.tests.ray.deploying", cluster.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | cluster.environment,
        start_new_session=True,
    )
    try:
        yield Deployer(process)
    finally:
        process.kill()
        process.communicate()


def _main(address: str) -> None:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    ray.init(address=address, log_to_driver=False)
    for line in sys.stdin:
        config = ServeDeploySchema.model_validate(json.loads(line))
        serve.start(
            proxy_location=config.proxy_location, http_options=config.http_options.model_dump()
        )
        client = _get_global_client()
        assert client is not None, "Serve was started"
        client.deploy_apps(config)
        print("deployed", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
