"""What a server tells about itself: models, health, paths, metrics, and the front page."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..runtime.errors import EngineError
from .caller import caller_of
from .gateway import Gateway
from .json_body import JsonObject
from .json_response import json_response
from .metrics import WorkerStats
from .served_model import ServedModel
from .served_worker import Worker

OK = "ok"
ASLEEP = "asleep"  # well: a request wakes it
READ = ["GET"]  # and HEAD: edge.py
FRONT_PAGE = {
    "polypath": "One model name over machines that differ; OpenAI's API under /v1.",
    "endpoints": {
        "POST": ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"],
        "GET": ["/v1/models", "/v1/paths", "/health", "/metrics", "/openapi.json"],
    },
}


def info_routes(gateway: Gateway) -> APIRouter:
    """Everything that is read and changes nothing."""
    router = APIRouter()

    async def front_page(request: HttpRequest) -> Response:
        models = filter(caller_of(request).may_use, gateway.models)
        return json_response(FRONT_PAGE | {"models": list(models)})

    async def list_models(request: HttpRequest) -> Response:
        caller = caller_of(request)
        models = [_model(gateway.models[name]) for name in gateway.models if caller.may_use(name)]
        return json_response({"object": "list", "data": models})

    async def get_model(request: HttpRequest) -> Response:
        name = request.path_params["model_id"]
        return json_response(_model(caller_of(request).find_model(gateway, name)))

    async def health(_: HttpRequest) -> Response:
        # One worker that is suspended is not waited for where others do: who asks waits a second.
        stats = await gateway.all_stats(lambda stats: health_report(gateway, stats)["status"] == OK)
        report = health_report(gateway, stats)
        return json_response(report, 200 if report["status"] == OK else 503)

    async def paths(_: HttpRequest) -> Response:
        stats = await gateway.all_stats()
        data = [
            _paths(worker, stats[worker.id])
            for worker in gateway.all_workers()
            if worker.id in stats
        ]
        return json_response({"object": "list", "data": data})

    async def metrics(_: HttpRequest) -> Response:
        stats = await gateway.all_stats()
        workers = [worker for worker in gateway.all_workers() if worker.id in stats]
        for model in gateway.models.values():
            gateway.metrics.show_queue(model.name, len(model.line), model.line.queue_time_s())
        with suppress(EngineError):  # the last numbers stand
            if (journal := await gateway.scaling()) is not None:
                gateway.metrics.show_scaling(journal)
        text = gateway.metrics.render(_worker_stats(worker, stats[worker.id]) for worker in workers)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    router.add_api_route("/", front_page, methods=READ)
    router.add_api_route("/v1/models", list_models, methods=READ)
    router.add_api_route("/v1/models/{model_id:path}", get_model, methods=READ)
    router.add_api_route("/health", health, methods=READ)
    router.add_api_route("/v1/paths", paths, methods=READ)
    router.add_api_route("/metrics", metrics, methods=READ)
    return router


def _model(model: ServedModel) -> JsonObject:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "polypath",
        "max_model_len": model.max_model_len or None,
        "workers": len(model.workers),
        "pools": dict(Counter(worker.pool for worker in model.workers.values())),
        "chat_template": None
        if model.prompts.chat_template is None
        else model.prompts.chat_template.source,
        "facts": list(model.facts),
    }


def health_report(gateway: Gateway, stats: dict[str, dict[str, Any] | None]) -> JsonObject:
    """Each model is well when one of its workers answers over its link and its step loop is alive.

    A long step is no illness: dead is a loop that has work and was silent for the whole limit.
    """
    limit_s = gateway.settings.heartbeat_limit_s
    models: dict[str, str] = {}
    for model in gateway.models.values():
        answers = [stats.get(worker_id) for worker_id in model.workers]
        alive = [answer for answer in answers if answer is not None]
        if not model.workers:
            models[model.name] = "no worker" if model.asleep is None else ASLEEP
        elif not alive:
            models[model.name] = "no worker answers"
        elif all(_is_stuck(answer, limit_s) for answer in alive):
            models[model.name] = f"no step for {limit_s:g} s"
        else:
            models[model.name] = OK
    is_well = bool(models) and all(state in (OK, ASLEEP) for state in models.values())
    return {"status": OK if is_well else "unavailable", "models": models}


def _is_stuck(stats: dict[str, Any], limit_s: float) -> bool:  # JSON
    has_work = stats["running"] + stats["waiting"] > 0
    return has_work and stats["heartbeat_age_s"] > limit_s


def _paths(worker: Worker, stats: dict[str, Any] | None) -> JsonObject:  # JSON
    said = worker.description
    return {
        "worker_id": worker.id,
        "model": worker.model,
        "pool": worker.pool,
        "node": {
            "id": said.get("node_id"),
            "address": said.get("node_address"),
            "labels": worker.labels,
        },
        "fingerprint": worker.fingerprint,
        "path": worker.paths,
        "plan": said.get("plan"),
        "hardware": said.get("hardware"),
        "max_model_len": worker.max_model_len,
        "max_num_seqs": said.get("max_num_seqs"),
        "max_waiting": said.get("max_waiting"),
        "features": sorted(worker.features),
        "batch_invariant": worker.is_batch_invariant,
        "calibration": said.get("calibration"),  # at start
        "speeds": worker.speeds.to_json(),  # lately
        "concurrency": worker.concurrency,
        "pid": said.get("pid"),
        "started_at": said.get("started_at"),
        "link": worker.link.kind,  # road, handle, or local in tests
        "in_flight": worker.num_in_flight,
        "stats": stats,  # null: the worker did not answer in time
        "steps": (stats or {}).get("steps", []),
    }


def _worker_stats(worker: Worker, stats: dict[str, Any] | None) -> WorkerStats:  # JSON
    device = str((worker.description.get("plan") or {}).get("device", "unknown"))
    return WorkerStats(worker.id, worker.model, worker.pool, device, worker.path_header, stats)
