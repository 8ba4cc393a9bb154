"""From a command line or a serve.yaml to a checked fleet and the Ray that it will run on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.errors import ConfigurationError
from . import listen
from .config import ServeConfig
from .fleet import FleetSpec
from .nodes import Node, node_types, own_addresses
from .ray_named import NamedRay, NoAddress, Taken
from .serve_check import Checked, check_cluster, check_offline, check_own_ray

if TYPE_CHECKING:
    from .serve_view import ServeView


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeRequest:
    """What a user asked `polypath serve` for."""

    fleet: FleetSpec
    where: ServeConfig
    launcher_file: Path | None = None  # of Ray's cluster launcher: what its autoscaler may add

    @property
    def is_head_here(self) -> bool:
        """Whether the cluster's head is this machine, so that model files must be here too."""
        address = self.where.address or ""
        host = address.rpartition(":")[0].strip("[]")
        return address == "auto" or host in own_addresses()

    def launcher_types(self) -> list[Node]:
        """Node types of the launcher's file, if one was given."""
        return node_types(self.launcher_file) if self.launcher_file else []


def check_only(request: ServeRequest, view: ServeView) -> int:
    """`polypath serve --check`: say what is wrong, or what was found right and what is not known.
    Starts nothing; asks the named cluster for its nodes, if it answers. The exit code.
    """
    try:
        listen.claim(request.where.host, request.where.port)
        checked = _look(request)
    except ConfigurationError as error:
        view.refuse(error)
        return 2
    view.checked(checked)
    return 0


def _look(request: ServeRequest) -> Checked:
    """Check against the named cluster, a launcher's file, this machine, or nothing."""
    fleet, types = request.fleet, request.launcher_types()
    if request.where.address is not None:
        return _look_at_cluster(request, types)
    if types:
        return check_cluster(fleet, types, is_head_here=False)
    if any(pool.needs_cluster for _, pool in fleet.pools()):
        return check_offline(fleet, "no Ray cluster is named (address, --address, RAY_ADDRESS)")
    return check_own_ray(fleet)


def _look_at_cluster(request: ServeRequest, types: list[Node]) -> Checked:
    assert request.where.address is not None, "asked for with an address only"
    ray = NamedRay(request.where.address, request.where.address_origin)
    try:
        ray.prepare()
        nodes = ray.look()
    except (Taken, NoAddress):  # a start would be refused for it too
        raise
    except ConfigurationError as error:
        if types:
            checked = check_cluster(request.fleet, types, is_head_here=False)
            notes = (*checked.not_checked, f"the nodes that are there: {error}")
            return replace(checked, not_checked=notes)
        return check_offline(request.fleet, str(error))
    return check_cluster(request.fleet, [*nodes, *types], is_head_here=request.is_head_here)


def absolute(fleet: FleetSpec) -> FleetSpec:
    """The fleet with paths that do not depend on our working directory: workers have another."""
    models = []
    for model in fleet.models:
        template = model.chat_template
        if template is not None and "{" not in template:  # else it is the template itself
            template = _absolute(template)
        model = replace(model, model=_absolute(model.model), chat_template=template)
        same = {"model": model.model, "chat_template": template}
        pools = tuple(replace(pool, engine=replace(pool.engine, **same)) for pool in model.pools)
        engine = replace(model.engine, **same)
        models.append(replace(model, engine=engine, pools=pools))
    return replace(fleet, models=tuple(models))


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.resolve()) if model and path.exists() else model
