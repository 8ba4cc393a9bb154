"""What a process of our own Ray does before it is given anything to do: less, or something ahead.

Ray imports this module in each (RAY_preload_python_modules). One of the first two becomes Serve's
controller, whose imports keep one core busy for 2 s; the other, which then becomes a worker,
imports torch on the second. Wherever Ray does not obey, all is as without it, and slower.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from ..runtime.collector import paused

FOLDER = "POLYPATH_PRESTART"  # the variable with the folder of marks; without it nothing is done
UNWANTED = "pandas"  # Serve imports it wherever it is installed: 0.5 s, in each process
LIMIT_S = 20.0
PAUSE_S = 8.0  # in which a process has imported what it needs
EVERY_S = 0.02


def environment(folder: Path) -> dict[str, str]:
    """What Ray must find set when it starts; `folder` is this start's own."""
    return {"RAY_preload_python_modules": __name__, FOLDER: str(folder)}


def leave_out() -> None:
    """For a process of ours that uses Serve, before it imports it."""
    sys.modules.setdefault(UNWANTED, None)  # pyright: ignore[reportArgumentType]


def is_actor() -> bool:
    """Whether Ray has given this process its actor."""
    import ray

    return ray.get_runtime_context().get_actor_id() is not None


def import_ahead(folder: Path) -> bool:
    """Wait until some process has become the first actor; if it is not this one, and no other has
    begun, import what a worker needs. Whether it did.
    """
    deadline = time.monotonic() + LIMIT_S
    taken, begun = folder / "controller", folder / "worker"
    while time.monotonic() < deadline and not begun.exists():
        if is_actor():
            taken.touch()
            return False
        if taken.exists():
            return _import_worker(begun)
        time.sleep(EVERY_S)
    return False


def _import_worker(begun: Path) -> bool:
    with suppress(OSError):  # another was faster, or the folder is gone
        with begun.open("x") as mark:
            mark.write(str(os.getpid()))
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

        return True
    return False


def _begin(folder: Path, pause: ExitStack) -> None:
    began = time.monotonic()
    with pause:
        import_ahead(folder)
        time.sleep(max(0.0, began + PAUSE_S - time.monotonic()))


if found := os.environ.get(FOLDER):
    leave_out()
    pause = ExitStack()
    pause.enter_context(paused())  # the collector takes 0.3 s of 3, looking for garbage in modules
    threading.Thread(target=_begin, args=(Path(found), pause), daemon=True).start()
