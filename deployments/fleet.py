"""What is to be served, as plain values: models, each with the pools of workers that serve it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from ..runtime.config import EngineConfig
from .api_settings import ApiSettings
from .auth_config import AuthConfig
from .autoscaling_pools import PoolRules, ScalingRules
from .router import RoutingRules

DEFAULT_POOL = "default"
GATEWAY_CPUS = 0.25
UNKNOWN_MAX_RUNNING = 1024  # on a cluster the worker's plan is made there


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """Equal workers of one model: how many, where they may run, with which engine options."""

    name: str = DEFAULT_POOL
    engine: EngineConfig
    num_workers: int = 1  # at least, and when it starts; 0: it sleeps until it is needed
    max_workers: int | None = None  # None: as many as num_workers
    price: float = 1.0  # of one worker for an hour, beside the other pools'
    cold_start_s: float = 60.0  # as stated: from the wish for a worker to its first token
    num_cpus: float | None = None  # of each worker; None: all that a node has free
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # Ray's custom ones
    label_selector: dict[str, str] = field(default_factory=dict)
    accelerator_type: str | None = None
    max_surge_percent: int = 0  # of its workers, that an update may start before it stops old ones
    max_running: int | None = None  # requests of one worker, running and queued; from its plan
    where: str = ""  # where the user wrote it, such as "serve.yaml, line 12", for messages

    @property
    def needs_cluster(self) -> bool:
        """Whether it asks for what a Ray of our own never has."""
        return bool(self.label_selector or self.resources or self.accelerator_type)

    @property
    def most_workers(self) -> int:
        """Workers under load."""
        return self.num_workers if self.max_workers is None else self.max_workers

    @property
    def is_elastic(self) -> bool:
        """Whether the number of its workers follows the load."""
        return self.most_workers > self.num_workers

    @property
    def workers_text(self) -> str:
        """How many workers, for messages: `2`, or `0 to 4`."""
        return (
            f"{self.num_workers} to {self.most_workers}"
            if self.is_elastic
            else str(self.num_workers)
        )

    @property
    def edition(self) -> str:
        """A short name for all that makes its workers what they are."""
        made_of = (
            self.engine,
            self.num_cpus,
            self.num_gpus,
            sorted(self.resources.items()),
            sorted(self.label_selector.items()),
            self.accelerator_type,
        )
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]

    def scaling_rules(self) -> PoolRules:
        """For the scaling policy."""
        return PoolRules(
            min_workers=self.num_workers,
            max_workers=self.most_workers,
            price=self.price,
            cold_start_s=self.cold_start_s,
        )

    def at_most(self) -> int:
        """Requests that Serve should let through to one worker."""
        if self.max_running is not None:
            return self.max_running
        return (self.engine.max_num_seqs or 0) + (self.engine.max_waiting or UNKNOWN_MAX_RUNNING)

    def demand(self, num_cpus: float | None = None) -> dict[str, float]:
        """What Ray must have on one node for one worker, by Ray's resource names."""
        cpus = self.num_cpus if num_cpus is None else num_cpus
        wanted = {"CPU": cpus or 0.0, "GPU": self.num_gpus, **self.resources}
        if self.accelerator_type is not None:
            wanted[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model name and its pools. `auto_pools` says that the nodes decide which pools there are;
    `pools` is then empty until they are known.
    """

    model: str  # folder, .gguf file or hub id
    name: str | None = None  # that clients ask for; None: the model's own
    chat_template: str | None = None
    engine: EngineConfig  # options of all its pools, for auto_pools
    pools: tuple[PoolSpec, ...] = ()
    rules: RoutingRules = field(default_factory=RoutingRules)
    auto_pools: bool = False
    scaling: ScalingRules = field(default_factory=ScalingRules)
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """Everything one application serves, and its gateway."""

    models: tuple[ModelSpec, ...]
    gateway_cpus: float = GATEWAY_CPUS
    settings: ApiSettings | None = None
    auth: AuthConfig = field(default_factory=AuthConfig)  # who may use it
    is_described: bool = True  # in a file; False: by the command line, in one pool

    @property
    def is_elastic(self) -> bool:
        """Whether any pool follows the load."""
        return any(pool.is_elastic for _, pool in self.pools())

    def pools(self) -> list[tuple[ModelSpec, PoolSpec]]:
        """Every pool with its model, in the order of the file."""
        return [(model, pool) for model in self.models for pool in model.pools]


def plain_fleet(config: EngineConfig) -> FleetSpec:
    """One model with one worker on the node that has most CPUs free."""
    pool = PoolSpec(engine=config)
    model = ModelSpec(
        model=config.model,
        name=config.served_model_name,
        chat_template=config.chat_template,
        engine=config,
        pools=(pool,),
    )
    return FleetSpec(models=(model,), is_described=False)


def deployment_name(fleet: FleetSpec, model: ModelSpec, pool: PoolSpec) -> str:
    """The Serve deployment of a pool: `worker` for the command line, else model and pool."""
    if not fleet.is_described:
        return "worker"
    name = model.name or f"model-{fleet.models.index(model)}"
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.{pool.name}"


def pool_title(fleet: FleetSpec, model: ModelSpec, pool: PoolSpec) -> str:
    """How messages call a pool: `pool gpu`, with its model where there are several, and `the
    worker` of a command line.
    """
    if not fleet.is_described:
        return "the worker"
    if len(fleet.models) == 1:
        return f"pool {pool.name}"
    return f"pool {pool.name} of {model.name or model.model}"
