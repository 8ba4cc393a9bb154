"""What lives in a worker's process: one engine on a thread of its own, and asyncio streams out of
it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, replace
from itertools import count

from ..runtime.config import EngineConfig
from ..runtime.engine import Engine
from ..runtime.errors import EngineError, RequestError
from ..runtime.forward_mode import ForwardMode
from ..runtime.planning.features import FEATURES, is_batch_invariant
from ..runtime.request import FinishReason, Request, RequestOutput
from ..runtime.startup import OnProgress, StartupEvent
from .load import LoadMeter, WorkerLoad
from .outlet import Outlet, StreamOutlet
from .place import Place

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
HAND_OVER_S = 5.0  # for the step that runs to end, and its streams with it
IDLE_BEAT_S = 0.5  # an idle engine thread wakes this often, so that its heartbeat stays young

AfterStep = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stream:
    """An open request: the id its sender gave it, and where its outputs go."""

    request_id: str
    outlet: Outlet


class Worker:
    """Serves one model on this node. `start` blocks until ready; the rest runs on one asyncio loop.

    The engine thread hands over the outputs of each step together, with one call into the loop.
    """

    def __init__(self, config: EngineConfig, place: Place | None = None) -> None:
        self.config = config
        self.place = place or Place()
        self.worker_id = f"worker-{uuid.uuid4().hex[:8]}"
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Stream] = {}  # by the engine's name of the request
        self._generating: set[str] = set()  # request ids of open `generate` iterators
        self._attempts = count(1)
        self._listeners: list[AfterStep] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_draining = False
        self._hands_over = False  # a request that is cancelled now goes on with another worker
        self._failure: str | None = None
        self._load: WorkerLoad | None = None
        self._beat_s = time.monotonic()
        self._started_at = time.time()

    @property
    def engine(self) -> Engine:
        """The engine; only after `start`."""
        assert self._engine is not None, "the worker has not been started"
        return self._engine

    def start(self, on_progress: OnProgress | None = None) -> None:
        """Build the engine and start its thread. Raises what `Engine.build` raises."""
        began = time.monotonic()
        self.adopt(
            Engine.build(
                self.config,
                on_progress=on_progress,
                cores_given=self.place.num_cpus,
                calibrates=True,
            )
        )
        if on_progress is not None:
            seconds = time.monotonic() - began
            on_progress(
                StartupEvent(stage="ready", message=self.worker_id, fraction=1.0, seconds=seconds)
            )

    def adopt(self, engine: Engine) -> None:
        """Drive this engine, on a thread of its own."""
        self._engine = engine
        self._meter = LoadMeter(engine)
        self._load = self._meter.look()
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the engine thread; streams still open end with an EngineError."""
        self._is_stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """One item per step that gives this request something; closing the iterator cancels the
        request.

        Raises RequestError, ContextLengthError or QueueFullError before the first item, EngineError
        when the engine dies.
        """
        if request.id in self._generating:
            raise RequestError(f"a request with id {request.id!r} is running already", "id")
        outlet = StreamOutlet(request)
        key = self.open(request, outlet)
        self._generating.add(request.id)
        try:
            async for output in outlet.outputs():
                yield output
        finally:
            self._generating.discard(request.id)
            self.close(key)

    def open(self, request: Request, outlet: Outlet) -> str:
        """Queue a request whose outputs go to `outlet`, on the loop that runs now. Returns the name
        that the engine knows it by: its id, or another one while an earlier attempt has not ended.

        Raises RequestError, ContextLengthError, QueueFullError or EngineError; then nothing was
        queued.
        """
        self._require_alive()
        self._loop = asyncio.get_running_loop()
        key = request.id
        while key in self._streams or self.engine.knows(key):
            key = f"{request.id}~{next(self._attempts)}"
        self.engine.submit(request if key == request.id else replace(request, id=key))
        self._streams[key] = Stream(request.id, outlet)
        self._wake.set()
        return key

    def close(self, key: str) -> None:
        """Nobody listens any more to what `open` called `key`: end it if it still runs."""
        if self._streams.pop(key, None) is not None and self._engine is not None:
            self._engine.cancel(key)
            self._wake.set()

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; its last output still comes. An ended or unknown one
        is left alone.
        """
        for key, stream in self._streams.items():
            if stream.request_id == request_id:
                self.cancel_attempt(key)

    def cancel_attempt(self, key: str) -> None:
        """The same for the one attempt that `open` called `key`."""
        if self._engine is not None:
            self._engine.cancel(key)
            self._wake.set()

    def hold(self, is_held: bool) -> None:
        """Tell all gateways to send nothing new, or that they may again. What comes all the same is
        taken: a gateway may not have heard it yet.
        """
        self._meter.is_held = is_held
        if self._load is not None:
            self._load = replace(self._load, is_held=is_held)

    async def drain(self, limit_s: float) -> None:
        """Take nothing new, let what runs end for `limit_s` seconds at most, then hand it over:
        each stream that is left ends as `moved`, and another worker goes on from there.
        """
        self._is_draining = True
        await self._until_none_is_open(limit_s)
        self._hands_over = True
        for key in self._streams:
            self.cancel_attempt(key)
        await self._until_none_is_open(HAND_OVER_S)

    async def _until_none_is_open(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._streams and time.monotonic() < deadline_s and self._failure is None:
            await asyncio.sleep(DRAIN_POLL_S)

    def listen(self, after_step: AfterStep) -> None:
        """Call `after_step` on the loop once a step's outputs are in their outlets."""
        self._listeners.append(after_step)

    def unlisten(self, after_step: AfterStep) -> None:
        """Undo `listen`."""
        self._listeners.remove(after_step)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._is_stopping or self._engine is None:
            raise EngineError(f"{self.worker_id} is not taking requests: it starts or stops")
        if self._is_draining:
            raise EngineError(f"{self.worker_id} is leaving and takes no new requests")

    def _drive(self) -> None:
        """The engine thread: steps while there is work, sleeps otherwise."""
        try:
            while not self._is_stopping:
                self._beat_s = time.monotonic()
                if not self.engine.has_work():
                    self._wake.wait(IDLE_BEAT_S)
                    self._wake.clear()
                    continue
                outputs = self.engine.step()
                self._load = self._meter.after_step()
                self._hand_over(outputs)
            self._fail_streams(f"{self.worker_id} has stopped")
        except Exception:  # the edge of the thread: whatever it is, clients must hear of it
            logger.exception("the engine thread of %s died", self.worker_id)
            self._failure = f"the engine of {self.worker_id} has died; see the worker's log"
            self._fail_streams(self._failure)

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        if outputs or self._listeners:
            self._on_loop(self._deliver, outputs)

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        """Call from the engine's thread; nothing when the loop of the last request is closed."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                if output.finish_reason is FinishReason.CANCELLED and self._hands_over:
                    output = replace(output, finish_reason=FinishReason.MOVED)
                stream.outlet.put(output)
                if output.finish_reason is not None:
                    del streams[output.request_id]
        for after_step in self._listeners:
            after_step()

    def _fail_streams(self, message: str) -> None:
        def fail() -> None:
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.outlet.fail(EngineError(message))

        self._on_loop(fail)

    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine thread last began a step or an idle beat."""
        return time.monotonic() - self._beat_s

    def failure(self) -> str | None:
        """Why the engine is dead, or None."""
        return self._failure

    def load(self) -> WorkerLoad | None:
        """As of the last step; None before the start."""
        return self._load

    def describe(self) -> dict[str, object]:
        """Identity, fixed at ready: plan, hardware, limits."""
        plan, calibration = self.engine.plan, self.engine.calibration
        return {
            "worker_id": self.worker_id,
            "model": self.config.served_model_name or self.engine.checkpoint.name,
            "model_path": self.config.model,
            "max_model_len": plan.max_model_len,
            "max_num_seqs": plan.max_num_seqs,
            "max_waiting": plan.max_waiting,
            "vocab_size": self.engine.model.config.vocab_size,
            "fingerprint": plan.fingerprint(),
            "path": {str(mode): plan.path_name(ForwardMode(mode)) for mode in plan.paths},
            "plan": plan.to_json(),
            "features": list(FEATURES),
            "batch_invariant": is_batch_invariant(plan),
            "calibration": None if calibration is None else calibration.to_json(),
            "hardware": self.engine.hardware.to_json(),
            "pid": os.getpid(),
            "started_at": self._started_at,
            **self.place.to_json(),
        }

    def stats(self) -> dict[str, object]:
        """Live load and counters."""
        return {
            "worker_id": self.worker_id,
            "heartbeat_age_s": self.heartbeat_age_s(),
            "load": None if self._load is None else asdict(self._load),
            **self.engine.stats(),
        }
