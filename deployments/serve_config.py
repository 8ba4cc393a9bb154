"""From a serve.yaml to what is to be served, or to sentences that say what is wrong in which line.

Nothing here looks at a node, a model's files or Ray: `serve_check.py` does.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..runtime.config import EngineConfig
from ..runtime.errors import ConfigurationError
from ..runtime.planning.explanation import refuse_unknown_names
from .api_settings import ApiSettings
from .autoscaling_pools import ScalingRules
from .fleet import FleetSpec, ModelSpec, PoolSpec
from .label_selector import parse_rule, why_not_key
from .router import RoutingRules
from .serve_faults import Fault, faults_of, refused
from .serve_file import Document, Loc, read_document, spell
from .serve_schema import ModelEntry, PoolEntry, ServeEntry

_POOL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_OPTION = re.compile(r"--([a-z][a-z-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeFile:
    """A file that was read: where to listen, which Ray, what to serve."""

    name: str
    host: str | None
    port: int | None
    address: str | None
    fleet: FleetSpec


def read_serve_file(path: Path) -> ServeFile:
    """Raises ConfigurationError with a sentence, and the line, for each fault."""
    document = read_document(path)
    entry = _validated(document)
    return ServeFile(
        name=document.name,
        host=entry.host,
        port=entry.port,
        address=entry.address,
        fleet=_fleet(document, entry),
    )


def fleet_from_args(args: dict[str, Any]) -> FleetSpec:  # Any: what Ray's config file holds
    """The same from `args` of an application in Ray's own config file, where Ray already says
    where to listen. Raises ConfigurationError.
    """
    document = Document(name="args", data=args)
    for key in ("host", "port", "address"):
        if key in args:
            raise ConfigurationError(
                f"args.{key} has no place here: Ray's own file says it, under http_options"
            )
    return _fleet(document, _validated(document))


def _validated(document: Document) -> ServeEntry:
    try:
        return ServeEntry.model_validate(document.data)
    except ValidationError as error:
        faults = faults_of(document, error)
    raise refused(document, faults)


def _fleet(document: Document, entry: ServeEntry) -> FleetSpec:
    faults: list[Fault] = []
    models = [
        _model(document, ("models", number), model, faults)
        for number, model in enumerate(entry.models)
    ]
    settings = _settings(entry, faults)
    autos = [number for number, model in enumerate(entry.models) if model.pools == "auto"]
    if autos and len(entry.models) > 1:
        where = ("models", autos[0], "pools")
        faults.append(
            (
                where,
                f"{spell(where)} is auto, which takes all nodes for one model; "
                "list the pools where there are several",
            )
        )
    _find_twins(("models",), [model.name for model in models], "two models", faults)
    if faults:
        raise refused(document, faults)
    return FleetSpec(
        models=tuple(models),
        gateway_cpus=entry.gateway.num_cpus,
        settings=settings,
        auth=entry.auth,
    )


def _settings(entry: ServeEntry, faults: list[Fault]) -> ApiSettings:
    said: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry.api.model_dump(exclude_none=True).items()
    }
    try:
        return ApiSettings(**said)
    except ConfigurationError as error:
        faults.append((("api",), f"api: {error}"))
        return ApiSettings()


def _model(document: Document, loc: Loc, entry: ModelEntry, faults: list[Fault]) -> ModelSpec:
    entries = [] if entry.pools == "auto" else list(entry.pools)
    engine = _engine(
        (*loc, "engine"), _engine_of(entry), entry.engine.model_dump(exclude_none=True), faults
    )
    pools = [
        _pool(document, (*loc, "pools", number), engine, pool, faults)
        for number, pool in enumerate(entries)
    ]
    _find_twins((*loc, "pools"), [pool.name for pool in pools], "two pools of a model", faults)
    return ModelSpec(
        model=entry.model,
        name=entry.name,
        chat_template=entry.chat_template,
        engine=engine,
        pools=tuple(pools),
        rules=_rules(loc, entry, faults),
        auto_pools=entry.pools == "auto",
        scaling=ScalingRules(**entry.scaling.model_dump(exclude_none=True)),
        where=document.place(loc),
    )


def _rules(loc: Loc, entry: ModelEntry, faults: list[Fault]) -> RoutingRules:
    """How requests spread over the pools; names in `prefer` must be pools of this model."""
    prefer = entry.prefer or []
    if entry.pools == "auto" and prefer:
        where = spell((*loc, "prefer"))
        faults.append(
            ((*loc, "prefer"), f"{where} names pools; with pools: auto there are none yet")
        )
        return RoutingRules()
    names = [] if entry.pools == "auto" else [pool.name for pool in entry.pools]
    for number, name in enumerate(prefer):
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"pools are {', '.join(names)}"
            where = (*loc, "prefer", number)
            faults.append((where, f"{spell(where)} is {name[:80]!r}, which is no pool; {hint}"))
    if entry.spill is not None and not prefer:
        where = spell((*loc, "spill"))
        faults.append(
            ((*loc, "spill"), f"{where} says nothing without prefer: give the pools' order")
        )
    try:
        return RoutingRules(prefer=tuple(prefer), spill=entry.spill is not False)
    except ConfigurationError as error:
        faults.append(((*loc, "prefer"), f"{spell((*loc, 'prefer'))}: {error}"))
        return RoutingRules()


def _pool(
    document: Document, loc: Loc, base: EngineConfig, entry: PoolEntry, faults: list[Fault]
) -> PoolSpec:
    faults.extend(_pool_faults(loc, entry))
    said = entry.engine.model_dump(exclude_none=True)
    wanted = _device(loc, entry, said.get("device", base.device), faults)
    engine = _engine((*loc, "engine"), base, said | {"device": wanted}, faults)
    if 0 < entry.num_gpus < 1 and engine.kv_bytes is None:
        share = engine.memory_share
        if share is None or share > entry.num_gpus:
            found = "is not given" if share is None else f"is {share:g}"
            text = f"num_gpus {entry.num_gpus:g} shares a card, but memory_share {found}"
            lift = f"give memory_share {entry.num_gpus:g} or less, or kv_bytes"
            faults.append(((*loc, "num_gpus"), f"{spell(loc)}: {text}; {lift}"))
    most = None if entry.num_cpus is None else max(1, math.ceil(entry.num_cpus))
    if most is not None and engine.num_threads is not None and engine.num_threads > most:
        text = f"num_threads {engine.num_threads} is more than num_cpus {entry.num_cpus:g} gives"
        faults.append(((*loc, "num_cpus"), f"{spell(loc)}: {text}; raise num_cpus"))
    return PoolSpec(
        name=entry.name,
        engine=engine,
        num_workers=entry.min_workers,
        max_workers=entry.max_workers,
        price=entry.price or 1.0,
        cold_start_s=entry.cold_start_s or 60.0,
        max_surge_percent=entry.max_surge_percent,
        num_cpus=entry.num_cpus,
        num_gpus=entry.num_gpus,
        resources=dict(entry.resources),
        label_selector=dict(entry.label_selector),
        accelerator_type=entry.accelerator_type,
        where=document.place(loc),
    )


def _pool_faults(loc: Loc, entry: PoolEntry) -> Iterator[Fault]:
    """What a pool's own keys say wrong."""
    if not _POOL_NAME.fullmatch(entry.name):
        yield (
            (*loc, "name"),
            f"{spell((*loc, 'name'))} is {entry.name[:80]!r}; letters, digits, - _ . "
            "and at most 63 characters",
        )
    if entry.min_workers == 0 and entry.max_workers is None:
        yield (
            (*loc, "min_workers"),
            f"{spell((*loc, 'min_workers'))} is 0 without max_workers: the pool could never have a "
            "worker; give max_workers 1 or more",
        )
    if entry.max_workers is not None and entry.max_workers < entry.min_workers:
        yield (
            (*loc, "max_workers"),
            f"{spell((*loc, 'max_workers'))} is {entry.max_workers}, less than min_workers "
            f"{entry.min_workers}; give at least as many",
        )
    if entry.num_gpus > 1:
        yield (
            (*loc, "num_gpus"),
            f"{spell((*loc, 'num_gpus'))} is {entry.num_gpus:g}; a worker runs on one GPU: give "
            "1, and more workers",
        )
    for name in {"CPU", "GPU", "memory", "object_store_memory"} & set(entry.resources):
        yield (
            (*loc, "resources", name),
            f"{spell((*loc, 'resources', name))} is no custom resource; "
            "num_cpus and num_gpus say what a worker takes",
        )
    for key, text in entry.label_selector.items():
        yield from _selector_faults((*loc, "label_selector", key), key, text)


def _selector_faults(loc: Loc, key: str, text: str) -> Iterator[Fault]:
    problem = why_not_key(key)
    if problem is not None:
        yield loc, f"{spell(loc)}: {problem}"
    try:
        parse_rule(text)
    except ValueError as error:
        yield loc, f"{spell(loc)}: {error}"


def _device(loc: Loc, entry: PoolEntry, said: str, faults: list[Fault]) -> str:
    """The device that a pool's GPUs, or their absence, mean: no worker may take a card that Ray
    gave to another one, and none that was to have a card may run without it in silence.
    """
    meant = "cuda" if entry.num_gpus else "cpu"
    if said not in ("auto", meant) and said in ("cpu", "cuda"):
        where = spell((*loc, "engine", "device"))
        lift = "leave num_gpus out" if entry.num_gpus else "give the pool num_gpus: 1"
        faults.append(
            (
                (*loc, "engine", "device"),
                f"{where} is {said}, but num_gpus is {entry.num_gpus:g}: {lift}",
            )
        )
    return meant if said == "auto" else said


def _engine_of(model: ModelEntry) -> EngineConfig:
    return EngineConfig(
        model=model.model, served_model_name=model.name, chat_template=model.chat_template
    )


def _engine(
    loc: Loc, base: EngineConfig, said: dict[str, Any], faults: list[Fault]
) -> EngineConfig:
    """`base` with the options that were said, by EngineConfig's own rules; `base` if they fail."""
    try:
        config = replace(base, **said)
        refuse_unknown_names(config)
    except ConfigurationError as error:
        sentence = _OPTION.sub(lambda found: found[1].replace("-", "_"), str(error))
        named = next((name for name in said if re.search(rf"\b{name}\b", sentence)), None)
        faults.append(((*loc, named) if named else loc, f"{spell(loc)}: {sentence}"))
        return base
    return config


def _find_twins(loc: Loc, names: Iterable[str | None], what: str, faults: list[Fault]) -> None:
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name is None:
            continue
        if name in seen:
            faults.append(((*loc, number), f"{what} are named {name}; names must differ"))
        seen.add(name)
