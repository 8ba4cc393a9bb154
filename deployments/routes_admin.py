"""`/admin`: workers that take nothing new, and how far each key is from its limits. Needs an admin
key (auth.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..runtime.errors import EngineError
from .auth_config import AuthConfig, KeyConfig
from .errors import ApiError
from .gateway import Gateway
from .json_body import JsonObject
from .json_response import json_response
from .ledger import Standing

if TYPE_CHECKING:
    from .ledger_link import LedgerLink
    from .served_worker import Worker


def admin_routes(gateway: Gateway, auth: AuthConfig, ledger: LedgerLink) -> APIRouter:
    """What an operator may look at and turn while the server runs."""
    router = APIRouter(prefix="/admin")

    async def workers(_: HttpRequest) -> Response:
        data = [_worker(worker) for worker in gateway.all_workers()]
        return json_response({"object": "list", "gateway": gateway.id, "data": data})

    async def drain(request: HttpRequest) -> Response:
        return await _turn(request, is_held=True)

    async def undrain(request: HttpRequest) -> Response:
        return await _turn(request, is_held=False)

    async def _turn(request: HttpRequest, *, is_held: bool) -> Response:
        worker = _find(gateway, request.path_params["worker_id"])
        try:
            async with asyncio.timeout(gateway.settings.stats_timeout_s):
                await worker.link.hold(is_held)  # the worker tells all gateways
        except TimeoutError:
            raise EngineError(f"{worker.id} does not answer; nothing was changed") from None
        gateway.models[worker.model].line.changed()  # what waits may have somewhere to go
        return json_response({"gateway": gateway.id, **_worker(worker)})

    async def limits(_: HttpRequest) -> Response:
        data = [_key(key, await ledger.standing(key.name)) for key in auth.keys]
        return json_response({"object": "list", "data": data})

    async def scaling(_: HttpRequest) -> Response:
        journal = await gateway.scaling()
        if journal is None:
            raise ApiError(404, "No pool of this server is scaled: give one max_workers.")
        names = dict(enumerate(gateway.models))
        models = {names[int(n)]: said for n, said in journal.get("models", {}).items()}
        return json_response({**journal, "models": models})

    router.add_api_route("/scaling", scaling, methods=["GET"])
    router.add_api_route("/workers", workers, methods=["GET"])
    router.add_api_route("/workers/{worker_id}/drain", drain, methods=["POST"])
    router.add_api_route("/workers/{worker_id}/undrain", undrain, methods=["POST"])
    router.add_api_route("/limits", limits, methods=["GET"])
    return router


def _find(gateway: Gateway, worker_id: str) -> Worker:
    for worker in gateway.all_workers():
        if worker.id == worker_id:
            return worker
    known = ", ".join(worker.id for worker in gateway.all_workers()) or "none"
    raise ApiError(404, f"There is no worker {worker_id[:100]!r}; there are: {known}.")


def _worker(worker: Worker) -> JsonObject:
    load = worker.link.load()
    return {
        "worker_id": worker.id,
        "model": worker.model,
        "is_draining": worker.is_draining,
        "in_flight": worker.num_in_flight,  # of this gateway
        "running": 0 if load is None else load.running,  # of all gateways, as it last said;
        "waiting": 0 if load is None else load.waiting,  # both 0: it may be stopped
    }


def _key(key: KeyConfig, standing: Standing) -> JsonObject:
    return {
        "name": key.name,
        "role": key.role.value,
        "models": key.models,
        "priority": key.priority,
        "requests_per_minute": {"limit": key.requests_per_minute, "used": standing.requests},
        "tokens_per_minute": {"limit": key.tokens_per_minute, "used": standing.tokens},
        "concurrent_requests": {"limit": key.max_concurrent, "used": standing.running},
    }
