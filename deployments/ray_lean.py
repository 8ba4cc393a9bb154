"""A local Ray without the processes that nothing of ours talks to: they take a third of its start.

On two cores `ray.init` takes 3.8 s without them, 5.7 to 7.2 with. Ray has no public switch: should
its next version have moved these ones, it starts as ever, and tests/ray/test_live_app.py says so.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

LEAN = {
    "no_monitor": True,  # of Ray's autoscaler, which has nothing to start on one machine
    "include_log_monitor": False,  # sends workers' output to drivers, which log_to_driver refuses
    "dashboard_agent_listen_port": 0,  # any: where it is taken Ray tries it again for 3 s
}


@contextmanager
def lean_ray() -> Iterator[int]:
    """Around `ray.init`, which gets no dashboard and, as its port, what this gives."""
    from ray._private import parameter

    with socket.socket() as taken:
        # Of its dashboard Ray starts the process even where none is wanted, unless the port that
        # was asked for is taken: without a dashboard that is an error in the log, and no more.
        taken.bind(("127.0.0.1", 0))
        usual = parameter.RayParams
        if set(LEAN) <= set(inspect.signature(usual).parameters):
            parameter.RayParams = partial(usual, **LEAN)
        try:
            yield taken.getsockname()[1]
        finally:
            parameter.RayParams = usual
