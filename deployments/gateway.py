"""The gateway: which models are served, by which workers, and which of them takes a request."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..runtime.errors import EngineError, RequestError
from .api_settings import ApiSettings
from .errors import ApiError, retry_after
from .metrics import GatewayMetrics
from .prompts import PromptReader

if TYPE_CHECKING:
    from ..actors.link import WorkerLink
    from ..runtime.chat_template import ChatTemplate
    from ..runtime.checkpoint.source import Checkpoint
    from ..runtime.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class Worker:
    """A worker as the gateway sees it: its link, what it said of itself, what we gave it."""

    link: WorkerLink
    id: str
    model: str
    fingerprint: str
    max_model_len: int  # tokens
    vocab_size: int
    capacity: int  # requests it runs and queues at most
    paths: dict[str, str]  # mode -> name of the planned path
    description: dict[str, Any]  # JSON: everything else, for /v1/paths
    num_in_flight: int = 0  # requests of this gateway that it runs or queues

    @property
    def path_header(self) -> str:
        """The planned path; where modes differ, each with its own."""
        if len(set(self.paths.values())) == 1:
            return next(iter(self.paths.values()))
        return ", ".join(f"{mode}={name}" for mode, name in self.paths.items())


@dataclass(kw_only=True, slots=True)
class ServedModel:
    """A model name with its text parts and the workers that serve it."""

    name: str
    prompts: PromptReader
    facts: tuple[str, ...] = ()  # one-line facts about tokenizer and template
    created: int = field(default_factory=lambda: int(time.time()))
    workers: dict[str, Worker] = field(default_factory=dict)  # by worker id

    @property
    def max_model_len(self) -> int:
        """Tokens of the largest context among the workers; 0 while there is none."""
        return max((worker.max_model_len for worker in self.workers.values()), default=0)

    @property
    def vocab_size(self) -> int:
        """Token ids that every worker knows; 0 while there is none."""
        return min((worker.vocab_size for worker in self.workers.values()), default=0)

    @property
    def capacity(self) -> int:
        """Requests that the roomiest worker runs and queues at most."""
        return max((worker.capacity for worker in self.workers.values()), default=0)


class Gateway:
    """Owns the served models; all methods belong to one event loop."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.settings = settings or ApiSettings()
        self.models: dict[str, ServedModel] = {}
        self.id = f"gateway-{secrets.token_hex(4)}"
        self.metrics = GatewayMetrics(self.id)

    def add_model(
        self,
        name: str,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        facts: tuple[str, ...] = (),
    ) -> ServedModel:
        """Serve `name` as soon as it has a worker."""
        prompts = PromptReader(
            tokenizer, chat_template, num_threads=self.settings.tokenizer_threads
        )
        model = ServedModel(name=name, prompts=prompts, facts=facts)
        self.models[name] = model
        return model

    def add_checkpoint(
        self, checkpoint: Checkpoint, *, name: str | None = None, chat_template: str | None = None
    ) -> ServedModel:
        """Serve the text side of a checkpoint under `name` (its own name by default)."""
        return self.add_model(
            name or checkpoint.name,
            checkpoint.tokenizer(),
            checkpoint.chat_template(chat_template),
            tuple(checkpoint.text_facts),
        )

    async def add_worker(self, link: WorkerLink) -> Worker:
        """Ask a worker what it is and use it from now on. Raises `EngineError`."""
        said = await link.describe()
        model = self.models.get(said["model"])
        if model is None:
            raise EngineError(
                f"a worker serves {said['model']!r}, which this gateway does not know"
            )
        worker = Worker(
            link=link,
            id=said["worker_id"],
            model=said["model"],
            fingerprint=said["fingerprint"],
            max_model_len=said["max_model_len"],
            vocab_size=said["vocab_size"],
            capacity=said["max_num_seqs"] + said["max_waiting"],
            paths=dict(said["path"]),
            description=said,
        )
        model.workers[worker.id] = worker
        return worker

    def remove_worker(self, worker_id: str) -> None:
        """Send a worker nothing more; its running streams go on. An unknown id is nothing."""
        for model in self.models.values():
            model.workers.pop(worker_id, None)

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
        if not model.workers:
            raise ApiError(
                503,
                f"No worker serves {model.name} right now; try again shortly.",
                code="no_worker",
                headers=retry_after(5.0),
            )

    def pick_worker(self, model: ServedModel, num_tokens: int) -> Worker:
        """The least loaded worker whose context holds `num_tokens`. Raises `ApiError` 503."""
        self.require_workers(model)
        fits = [worker for worker in model.workers.values() if worker.max_model_len >= num_tokens]
        return min(fits or model.workers.values(), key=lambda worker: worker.num_in_flight)

    def all_workers(self) -> list[Worker]:
        """Every worker of every model."""
        return [worker for model in self.models.values() for worker in model.workers.values()]

    async def all_stats(self) -> dict[str, dict[str, Any] | None]:  # JSON by worker id
        """Live stats of all workers; None for one that did not answer in time."""
        workers = self.all_workers()
        answers = await asyncio.gather(*(self._stats(worker) for worker in workers))
        return {worker.id: answer for worker, answer in zip(workers, answers, strict=True)}

    async def _stats(self, worker: Worker) -> dict[str, Any] | None:  # JSON
        try:
            async with asyncio.timeout(self.settings.stats_timeout_s):
                return await worker.link.stats()
        except (TimeoutError, EngineError):
            return None

    def close(self) -> None:
        """Let the tokenizer threads go."""
        for model in self.models.values():
            model.prompts.close()
