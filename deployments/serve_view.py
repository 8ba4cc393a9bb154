"""What `polypath serve` prints: plan, stages of the start, where it listens, and why it stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from .auto_pools import as_yaml
from .placement_faults import amounts

if TYPE_CHECKING:
    from ..runtime.errors import ConfigurationError
    from .fleet import ModelSpec
    from .pool_start import PoolStart
    from .serve_check import Checked, Planned
    from .startup import StartupRecord

STAGES = (  # of a worker, in order
    *("probe", "plan", "weights", "kv_pool", "graphs", "self_check", "memory", "calibration"),
    "ready",
)
PRINTED = STAGES[2:-1]  # the plan was shown
LABELS = {
    "ray": "Ray",
    "serve": "Serve",
    "worker": "worker",
    "probe": "probe",
    "plan": "plan",
    "weights": "weights",
    "kv_pool": "KV pool",
    "graphs": "graphs",
    "self_check": "self-check",
    "memory": "memory",
    "calibration": "calibration",
    "ready": "gateway",  # once the worker is ready, what is missing is an answer over HTTP
}
BAR_CELLS = 24


class ServeView:
    """One line per finished stage; on a terminal also a live line for the one that runs."""

    def __init__(self) -> None:
        # Held by file: sys.stdout itself is lent to Ray's chatter while the server runs.
        self._console = Console(file=sys.stdout)
        self._errors = Console(file=sys.stderr)
        self._began_s = time.monotonic()
        self._stage: tuple[str, str, float] | None = None  # name, message, start
        self._shown: set[str] = set()
        self._spinner = Spinner("dots")
        self._running: Live | None = None

    def title(self, model: str) -> None:
        self._print(f"Polypath serves {model or 'the default model'}")

    def plan(self, planned: Planned, *, is_described: bool) -> None:
        """Probe and plan in a few lines; `polypath probe` and `polypath plan` show all. Pools that
        were described in a file are named.
        """
        from .plan_view import render_summary

        checkpoint, pool, name = planned.checkpoint, planned.pool, planned.checkpoint.name
        if is_described:
            name = f"{planned.model.name}, pool {pool.name} of {pool.workers_text},"
        self.title(f"{name} ({checkpoint.path})")
        render_summary(planned.plan, self._console)
        for fact in checkpoint.text_facts:
            self._print(f"text  {fact}")

    def checked(self, checked: Checked) -> None:
        """What `--check` found right, pool by pool, and what it could not look at."""
        fleet = checked.fleet
        for model in fleet.models:
            self._print(f"{model.name}:")
            if model.auto_pools and model.pools:
                self.derived(model)
            for pool in model.pools:
                takes = amounts(pool.demand()) if pool.num_cpus else "all that a node has free"
                self._print(f"  pool {pool.name}: {pool.workers_text} workers, each takes {takes}")
                for found in checked.planned:
                    if found.pool is pool:
                        names = dict.fromkeys(path.name for path in found.plan.paths.values())
                        self._print(f"    planned here: {', '.join(names)}")
        for sentence in checked.not_checked:
            self._print(f"Not checked: {sentence}", style="yellow")
        self._print("Nothing wrong was found; nothing was started.")

    def derived(self, model: ModelSpec) -> None:
        """The pools that `auto` means, as they would stand in the file."""
        self._print(f"pools: auto, for the nodes that there are, means for {model.name}:")
        for line in as_yaml(model).splitlines():
            self._print(f"    {line}")

    def refuse(self, error: ConfigurationError) -> None:
        """Why nothing was started; a plan that cannot be shows its refusals."""
        from .plan_view import render_error

        render_error(error, self._errors)

    def stage(self, name: str, message: str) -> None:
        """A stage of ours begins; the one before it is done."""
        self._finish()
        self._stage = (name, message, time.monotonic())
        self._live(f"{LABELS[name]} {message}")

    def progress(self, pools: Sequence[PoolStart]) -> None:
        """The workers' stages, each printed once when it is done; of several workers only when
        each is ready.
        """
        if any(record.events for pool in pools for record in pool.records):
            self._finish()  # a worker's process is up
        if len(pools) == 1 and pools[0].num_workers == 1:
            if pools[0].records:
                self._worker(pools[0].records[-1].events)
            return
        for pool in pools:
            for record in pool.records:
                self._worker_ready(pool, record)
        num_ready, num_all = (
            sum(pool.num_ready for pool in pools),
            sum(p.num_workers for p in pools),
        )
        self._live(
            f"{num_ready} of {num_all} workers are ready" if num_ready < num_all else "gateway"
        )

    def _worker_ready(self, pool: PoolStart, record: StartupRecord) -> None:
        """One line for each worker, with its path and how long it took."""
        ready = next((event for event in record.events if event["stage"] == "ready"), None)
        name = f"{pool.title}, process {record.pid}"
        if ready is None or name in self._shown:
            return
        self._shown.add(name)
        paths = [event["message"] for event in record.events if event["stage"] == "plan"]
        self._print(
            f"  {name}: {', '.join(map(str, paths))}  [{float(str(ready['seconds'])):.1f} s]"
        )

    def _worker(self, events: list[dict[str, object]]) -> None:
        for event in events:
            name, seconds = str(event["stage"]), event["seconds"]
            if seconds is None:
                self._live(f"{LABELS[name]} {_bar(event['fraction'])} {event['message']}")
                continue
            self._live(LABELS[STAGES[min(STAGES.index(name) + 1, len(STAGES) - 1)]])
            if name in PRINTED and name not in self._shown:
                self._shown.add(name)
                self._line(name, str(event["message"]), float(str(seconds)))

    def ready(
        self, url: str, models: Sequence[str], warning: str | None, *, needs_key: bool = False
    ) -> None:
        """Where it listens, how to ask, how to stop."""
        self._finish()
        self.close()
        seconds = time.monotonic() - self._began_s
        body = f'{{"model": "{models[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self._print(f"Ready after {seconds:.1f} s: {url}/v1", style="bold green")
        if len(models) > 1:
            self._print(f"Models: {', '.join(models)}")
        if warning:
            self._print(f"Note: {warning}", style="yellow")
        key = ' -H "Authorization: Bearer $POLYPATH_API_KEY"' if needs_key else ""
        self._print(
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d "
            f"'{body}'"
        )
        self._print(f"  polypath chat --url {url}    polypath paths --url {url}")
        self._print("Ctrl-C stops it.")

    def note(self, sentence: str) -> None:
        self._print(sentence, style="yellow")

    def error(self, sentence: str, logs: Path | None = None) -> None:
        self.close()
        self._errors.print(Text.assemble(("error: ", "bold red"), sentence), soft_wrap=True)
        if logs:
            self._errors.print(Text(f"Logs: {logs}"), soft_wrap=True)

    def stopping(self, is_ours: bool) -> None:
        self.close()
        what = "Ray and the worker" if is_ours else "the application; Ray stays"
        self._print(f"\nStopping {what} ...")

    def close(self) -> None:
        """Take the live line off the terminal."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _live(self, text: str) -> None:
        if not self._console.is_terminal:
            return
        self._spinner.update(text=Text(text))
        if self._running is None:
            self._running = Live(
                self._spinner,
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._running.start()

    def _finish(self) -> None:
        if self._stage is not None:
            name, message, began = self._stage
            self._stage = None
            self._line(name, message, time.monotonic() - began)

    def _line(self, name: str, message: str, seconds: float) -> None:
        self._print(f"  {LABELS[name]:<11} {message}  [{seconds:.1f} s]".replace("   [", "  ["))

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


def _bar(fraction: object) -> str:
    if not isinstance(fraction, float):
        return ""
    done = round(fraction * BAR_CELLS)
    return "━" * done + "╌" * (BAR_CELLS - done)
