"""What can be known to go wrong before anything starts: model files, places, plans."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..runtime.checkpoint.hub import looks_like_hub_id
from ..runtime.checkpoint.source import Checkpoint, open_checkpoint, served_name
from ..runtime.checkpoint.templates import check_override
from ..runtime.errors import ConfigurationError, ModelError, PlanError
from ..runtime.planning.hardware import Hardware
from ..runtime.planning.memory import gigabytes
from ..runtime.planning.plan import ExecutionPlan
from ..runtime.planning.planner import plan as make_plan
from ..runtime.planning.probe import probe
from .auth_config import AuthConfig
from .auto_pools import derive
from .fleet import FleetSpec, ModelSpec, PoolSpec, pool_title
from .nodes import Node, this_machine
from .placement import fits, place


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What one pool's workers will do on this machine."""

    model: ModelSpec
    pool: PoolSpec
    checkpoint: Checkpoint
    plan: ExecutionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A fleet without known faults: names and CPUs filled in, pools derived."""

    fleet: FleetSpec
    planned: tuple[Planned, ...] = ()
    not_checked: tuple[str, ...] = ()  # a sentence each
    num_cpus: int = 0  # of this machine, and its GPUs that can be used: for a Ray of our own
    num_gpus: int = 0


@dataclass(kw_only=True, slots=True)
class _Opened:
    """The fleet with names, and the checkpoints by number of model that could be opened here."""

    fleet: FleetSpec
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    not_checked: list[str] = field(default_factory=list)


def check_own_ray(fleet: FleetSpec) -> Checked:
    """Everything, since all of it runs on this machine. Raises ConfigurationError."""
    opened = _open_models(fleet, must_be_here=True, weights=True)
    hardware = probe()
    fleet, cores = opened.fleet, hardware.cpu.cores_usable
    num_gpus = sum(gpu.problem is None for gpu in hardware.gpus)
    if fleet.is_described:
        # Our own Ray counts for us alone: the gateway must not take a core from the sums.
        fleet = replace(fleet, gateway_cpus=0.0)
    else:
        fleet = _with_card(fleet, opened.checkpoints[0], hardware)
    node = this_machine(cores, num_gpus)
    fleet = place(derive(fleet, [node]), [node])
    checked = _planned(fleet, opened.checkpoints, hardware, None)
    _require_memory(checked.planned)
    return replace(checked, num_cpus=cores, num_gpus=num_gpus)


def check_cluster(fleet: FleetSpec, nodes: Sequence[Node], *, is_head_here: bool) -> Checked:
    """Places against these nodes; plans of pools that can only run on this machine; the model's
    files where the head of the cluster is this machine. Raises ConfigurationError.
    """
    opened = _open_models(fleet, must_be_here=is_head_here)
    fleet = place(derive(opened.fleet, nodes), nodes)
    hardware = probe() if any(node.is_here for node in nodes) else None
    checked = _planned(fleet, opened.checkpoints, hardware, nodes)
    return replace(checked, not_checked=(*opened.not_checked, *checked.not_checked))


def check_offline(fleet: FleetSpec, reason: str) -> Checked:
    """What needs no cluster. Raises ConfigurationError."""
    opened = _open_models(fleet, must_be_here=False)
    pools = [pool_title(fleet, model, pool) for model, pool in fleet.pools()] or ["pools: auto"]
    sentence = f"whether the nodes for {', '.join(pools)} exist, and how they would run: {reason}"
    return Checked(fleet=opened.fleet, not_checked=(*opened.not_checked, sentence))


def _open_models(fleet: FleetSpec, *, must_be_here: bool, weights: bool = False) -> _Opened:
    """Give every model its name, and open what can be opened on this machine."""
    opened = _Opened(fleet=fleet)
    models, faults = [], []
    for number, model in enumerate(fleet.models):
        try:
            checkpoint = open_checkpoint(model.model, weights=weights)
            opened.checkpoints[number] = checkpoint
            name = model.name or checkpoint.name
        except ModelError as error:
            if must_be_here:
                faults.append(f"{model.where}: {error}" if model.where else str(error))
            name = model.name or _likely_name(model.model)
            opened.not_checked.append(f"the files of {name}, on nodes of the cluster ({error})")
        if model.chat_template is not None:
            try:
                check_override(model.chat_template)
            except ModelError as error:
                faults.append(f"{model.where}: {error}" if model.where else str(error))
        models.append(_named(model, name))
    if faults:
        raise ConfigurationError("\n".join(faults))
    names = [model.name for model in models]
    for model in models:
        if names.count(model.name) > 1:
            raise ConfigurationError(
                f"{models[names.index(model.name)].where} and others: two models are named "
                f"{model.name}; give them a name each"
            )
    _require_known_models(fleet.auth, [str(name) for name in names])
    opened.fleet = replace(fleet, models=tuple(models))
    return opened


def _require_known_models(auth: AuthConfig, names: list[str]) -> None:
    """Raise ConfigurationError for a key of a model that is not served: its user would find out."""
    for key in auth.keys:
        for name in key.models or ():
            if name not in names:
                near = difflib.get_close_matches(name, names, 1, 0.5)
                hint = f"did you mean {near[0]}?" if near else f"models are {', '.join(names)}"
                raise ConfigurationError(
                    f"auth: the key {key.name} may use {name[:80]!r}, which is not served; {hint}"
                )


def _named(model: ModelSpec, name: str) -> ModelSpec:
    """The model with a name that gateway and workers need not find out for themselves."""
    pools = tuple(
        replace(pool, engine=replace(pool.engine, served_model_name=name)) for pool in model.pools
    )
    engine = replace(model.engine, served_model_name=name)
    return replace(model, name=name, engine=engine, pools=pools)


def _likely_name(model: str) -> str:
    from pathlib import Path

    return model if looks_like_hub_id(model) else served_name(Path(model))


def _with_card(fleet: FleetSpec, checkpoint: Checkpoint, hardware: Hardware) -> FleetSpec:
    """The command line's one pool: it gets a card when the plan uses one."""
    (model,) = fleet.models
    (pool,) = model.pools
    device = make_plan(hardware, checkpoint.config, pool.engine).device
    pool = replace(pool, num_gpus=1.0 if device == "cuda" else 0.0)
    return replace(fleet, models=(replace(model, pools=(pool,)),))


def _planned(
    fleet: FleetSpec,
    checkpoints: dict[int, Checkpoint],
    hardware: Hardware | None,
    nodes: Sequence[Node] | None,
) -> Checked:
    """Make the plans of pools that run here and nowhere else. Raises PlanError, ModelError."""
    planned: list[Planned] = []
    unplanned: list[str] = []
    models = []
    for number, model in enumerate(fleet.models):
        checkpoint, pools = checkpoints.get(number), []
        for pool in model.pools:
            title = pool_title(fleet, model, pool)
            is_here = nodes is None or all(n.is_here for n in nodes if fits(pool, n))
            if hardware is None or checkpoint is None or not is_here:
                unplanned.append(title)
            else:
                plan = _plan(hardware, checkpoint, pool, title, fleet)
                pool = replace(pool, max_running=plan.max_num_seqs + plan.max_waiting)
                planned.append(Planned(model=model, pool=pool, checkpoint=checkpoint, plan=plan))
            pools.append(pool)
        models.append(replace(model, pools=tuple(pools)))
    sentence = f"the plans of {', '.join(unplanned)}: their workers make them on their nodes"
    return Checked(
        fleet=replace(fleet, models=tuple(models)),
        planned=tuple(planned),
        not_checked=(sentence,) if unplanned else (),
    )


def _require_memory(planned: Sequence[Planned]) -> None:
    """Each plan fits the memory alone; those that share the host's must fit it together."""
    plans = [found.plan for found in planned for _ in range(found.pool.most_workers)]
    on_host = [plan.memory for plan in plans if plan.device == "cpu"]
    limits = [memory.limit_bytes for memory in on_host if memory.limit_bytes is not None]
    needed = sum(memory.total_bytes for memory in on_host)
    if len(on_host) > 1 and limits and needed > min(limits):
        raise ConfigurationError(
            f"{len(on_host)} workers on this machine may take {gigabytes(needed)} together, and "
            f"there are {gigabytes(min(limits))}; give their pools kv_bytes, or a memory_share "
            f"of {1 / len(on_host) / 2:.2g} or less"
        )


def _plan(
    hardware: Hardware, checkpoint: Checkpoint, pool: PoolSpec, title: str, fleet: FleetSpec
) -> ExecutionPlan:
    try:
        given = hardware.with_cores_given(pool.num_cpus)
        return make_plan(given, checkpoint.config, pool.engine)
    except PlanError as error:
        if not fleet.is_described:
            raise
        text = f"{pool.where}: {title} cannot run on this machine: {error}"
        raise PlanError(text, error.refusals, error.nearest) from None
