"""Limits of API keys over several gateways on a real Ray, and over the loss of their ledger."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from polypath.deployments.ledger_shared import RENEW_S
from polypath.tests.ray.labelled_cluster import LabelledCluster, labelled_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class GatewayProcess:
    """One gateway in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None, "a pipe was asked for"
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()


@contextmanager
def gateway(cluster: LabelledCluster, name: str) -> Iterator[GatewayProcess]:
    command = [sys.executable, "-m", "polypath.tests.ray.ledger_gateway", cluster.address, name]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | cluster.environment,
    )
    try:
        found = GatewayProcess(process)
        assert found.hear() == "ready"
        yield found
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def gateways(no_server: None) -> Iterator[list[GatewayProcess]]:
    with labelled_cluster([{"num_cpus": 1}]) as cluster, ExitStack() as stack:
        yield [stack.enter_context(gateway(cluster, name)) for name in ("a", "b", "c")]


def admitted(gateways: list[GatewayProcess], line: str) -> int:
    """All gateways are asked at the same time."""
    for each in gateways:
        each.tell(line)
    return sum(int(each.hear()) for each in gateways)


def test_a_limit_holds_exactly_over_three_gateways(gateways: list[GatewayProcess]) -> None:
    assert admitted(gateways, "enter first 50 60") == 60
    assert admitted(gateways, "enter first 5 60") == 0
    assert gateways[2].ask("running first") == "60"


def test_one_gateway_may_take_what_is_left(gateways: list[GatewayProcess]) -> None:
    assert gateways[0].ask("enter second 7 20") == "7"
    assert gateways[1].ask("enter second 50 20") == "13"


def test_a_lost_ledger_is_replaced_and_told_what_runs(gateways: list[GatewayProcess]) -> None:
    assert admitted(gateways, "enter third 10 12") == 12
    time.sleep(RENEW_S + 1)  # until each has heard how many they are
    assert gateways[0].ask("kill") == "killed"
    # Alone each keeps to its share of 4 at most, and a new ledger allows 12 at most.
    assert admitted(gateways, "enter third 10 12") <= 12
    deadline = time.monotonic() + 60
    for each in gateways:
        while int(each.ask("running third")) < 12:
            assert time.monotonic() < deadline, "the new ledger was not told"
            time.sleep(0.5)
    assert admitted(gateways, "enter fourth 10 12") == 12
