"""The gateway: which models are served, and by which workers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..runtime.errors import EngineError, RequestError
from .api_settings import ApiSettings
from .errors import ApiError, retry_after
from .head_calls import HeadCalls
from .metrics import GatewayMetrics
from .open_requests import OpenRequests
from .pool_memory import PoolMemory
from .prompts import PromptReader
from .router import RoutingRules
from .served_model import Asleep, ServedModel
from .served_worker import Worker
from .waiting import Limits

if TYPE_CHECKING:
    from ..actors.link import WorkerLink
    from ..runtime.chat_template import ChatTemplate
    from ..runtime.checkpoint.source import Checkpoint
    from ..runtime.tokenizer import Tokenizer
    from .fleet import PoolSpec


Stats = dict[str, dict[str, Any] | None]  # JSON by worker id


class Gateway:
    """Owns the served models; all methods belong to one event loop."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.settings = settings or ApiSettings()
        self.models: dict[str, ServedModel] = {}
        self.id = f"gateway-{secrets.token_hex(4)}"
        self.metrics = GatewayMetrics(self.id)
        self.open_requests = OpenRequests()
        self.read_scaling: Callable[[], dict[str, Any]] | None = None  # the policy's journal
        self._head = HeadCalls("scaling")
        self._refreshing: asyncio.Task[None] | None = None

    def add_model(
        self,
        name: str,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        facts: tuple[str, ...] = (),
        rules: RoutingRules | None = None,
        asleep: Asleep | None = None,
        pools: tuple[PoolMemory, ...] = (),
    ) -> ServedModel:
        """Serve `name` as soon as it has a worker, spread over workers by `rules`; with `asleep`
        requests wait for one that is woken. `pools` are those that it may have workers of.
        """
        prompts = PromptReader(
            tokenizer, chat_template, num_threads=self.settings.tokenizer_threads
        )
        model = ServedModel(
            name=name,
            prompts=prompts,
            facts=facts,
            rules=rules or RoutingRules(),
            asleep=asleep,
            pools=pools,
            limits=Limits(
                max_queued=self.settings.max_queued,
                stranded_s=max(self.settings.stranded_s, 2 * asleep.wake_s if asleep else 0.0),
                same_class_s=self.settings.same_class_s,
            ),
        )
        self.models[name] = model
        return model

    def add_checkpoint(
        self,
        checkpoint: Checkpoint,
        *,
        name: str | None = None,
        chat_template: str | None = None,
        rules: RoutingRules | None = None,
        wake_s: float | None = None,
        max_model_len: int | None = None,
        pools: Sequence[PoolSpec] = (),
    ) -> ServedModel:
        """Serve the text side of a checkpoint under `name` (its own name by default). With `wake_s`
        it may sleep, and takes requests of up to `max_model_len` until a worker says better.
        """
        max_position = checkpoint.config.max_position
        tokenizer = checkpoint.tokenizer()
        asleep = None
        if wake_s is not None:
            context = max_model_len or max_position
            asleep = Asleep(wake_s=wake_s, max_model_len=context, vocab_size=tokenizer.vocab_size)
        return self.add_model(
            name or checkpoint.name,
            tokenizer,
            checkpoint.chat_template(chat_template),
            tuple(checkpoint.text_facts),
            rules,
            asleep,
            tuple(PoolMemory.of(pool, max_position) for pool in pools),
        )

    async def add_worker(self, link: WorkerLink) -> Worker:
        """Ask a worker what it is and use it from now on. Raises `EngineError`."""
        said = await link.describe()
        model = self.models.get(said["model"])
        if model is None:
            raise EngineError(
                f"a worker serves {said['model']!r}, which this gateway does not know"
            )
        worker = Worker.of(link, said)
        model.workers[worker.id] = worker
        model.met(worker)
        model.line.changed()
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh_speeds())
        return worker

    async def _refresh_speeds(self) -> None:
        """Now and then ask all workers what their live steps took."""
        while True:
            await asyncio.sleep(self.settings.refresh_s)
            await self.all_stats()

    def remove_worker(self, worker_id: str) -> None:
        """Send a worker nothing more; its running streams go on. An unknown id is nothing."""
        for model in self.models.values():
            if model.workers.pop(worker_id, None) is not None:
                model.line.changed()

    def find_model(self, name: str | None) -> ServedModel:
        """The model a request names, or the only one. Raises `RequestError`, `ApiError` 404."""
        known = ", ".join(self.models) or "none yet"
        if name is None:
            if len(self.models) == 1:
                return next(iter(self.models.values()))
            raise RequestError(f"model is missing; models served here: {known}", "model")
        model = self.models.get(name)
        if model is None:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here. Models served: {known}.",
                param="model",
                code="model_not_found",
            )
        return model

    def require_workers(self, model: ServedModel) -> None:
        """Raise `ApiError` 503 while no worker serves this model."""
        if not model.workers and model.asleep is None:
            raise ApiError(
                503,
                f"No worker serves {model.name} right now; try again shortly.",
                code="no_worker",
                headers=retry_after(5.0),
            )

    def queue_time_s(self, model: str) -> float:
        """Seconds that a new answer of this model is likely to wait here for a worker."""
        return self.models[model].line.queue_time_s()

    def all_workers(self) -> list[Worker]:
        """Every worker of every model."""
        return [worker for model in self.models.values() for worker in model.workers.values()]

    async def scaling(self) -> dict[str, Any] | None:  # JSON
        """The scaling policy's journal; None where no pool is scaled. Raises `EngineError` when
        Ray's head does not answer.
        """
        if self.read_scaling is None:
            return None
        try:
            return await self._head.ask(self.read_scaling)
        except TimeoutError:
            raise EngineError("Ray's head does not answer; ask again") from None

    async def all_stats(self, is_enough: Callable[[Stats], bool] | None = None) -> Stats:
        """Live stats of all workers; None for one that did not answer in time. With `is_enough`
        those who are late are not waited for once the others' say enough.
        """
        asked = {asyncio.ensure_future(self._stats(each)): each.id for each in self.all_workers()}
        found: Stats = {}
        pending = set(asked)
        when = asyncio.FIRST_COMPLETED if is_enough else asyncio.ALL_COMPLETED
        try:
            while pending and not (is_enough and is_enough(found)):
                done, pending = await asyncio.wait(pending, return_when=when)
                found |= {asked[task]: task.result() for task in done}
        finally:
            for task in pending:
                task.cancel()
        return found

    async def _stats(self, worker: Worker) -> dict[str, Any] | None:  # JSON
        try:
            async with asyncio.timeout(self.settings.stats_timeout_s):
                stats = await worker.link.stats()
        except (TimeoutError, EngineError):
            return None
        worker.observe(stats)
        return stats

    def close(self) -> None:
        """Let the tokenizer threads go, and ask nobody any more."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        self._head.close()
        for model in self.models.values():
            model.prompts.close()
