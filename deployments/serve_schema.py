"""The keys of a serve.yaml: names, types and what each means. docs/pools.md shows them in use."""

from __future__ import annotations

import re
import types
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
)

from ..runtime.config import EngineConfig
from .api_settings import ApiSettings
from .auth_config import AuthConfig
from .fleet import GATEWAY_CPUS

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
MOST_WORKERS = 10_000  # of a pool: Ray itself was never tried with more
MAX_NAME = 200  # characters of a model's name
ENGINE_HELP = {
    "device": "cpu or cuda; by default cuda in a pool with num_gpus and cpu in one without.",
    "dtype": "Of weights and activations: float32, bfloat16 or float16.",
    "kv_dtype": "Of keys and values; that of activations by default.",
    "runner": "How a pass is launched; `polypath plan` names those that there are.",
    "attention_backend": "Who computes attention.",
    "ops": "Who computes the other operations.",
    "linear_method": "How weights are stored and multiplied.",
    "quantization": "At most so many bits a weight, int8 or int4; by default as stored.",
    "flash_attn_library": "File of vLLM's FA3 extension (_vllm_fa3_C.abi3.so), without vLLM.",
    "num_threads": "CPU threads of a step; at most, and by default, the CPUs that Ray gave.",
    "page_size": "Tokens a KV page; a power of two.",
    "kv_bytes": "Size of the KV pool: 512MB, 1GiB or bytes.",
    "memory_share": "Share of the memory left after weights that the KV pool takes, 0 to 1.",
    "max_model_len": "Longest prompt and answer together, in tokens.",
    "max_num_seqs": "Requests that run at once.",
    "max_num_batched_tokens": "Tokens of one step.",
    "max_waiting": "Requests that may queue in a worker.",
    "prefix_cache": "Whether requests share pages of equal prompt beginnings.",
    "self_check": "Whether the planned paths are compared with the yardstick at start.",
    "overlap_depth": "Steps launched while one runs: 1 by default on a GPU, 0 on a CPU.",
    "calibration": "Whether the node's speed is measured at start.",
}
NO_ENGINE_OPTION = ("model", "served_model_name", "chat_template")  # said of the model


class Entry(BaseModel):
    """A mapping of the file: its keys are all that may stand there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _bytes(value: object) -> object:
    """Bytes of a size such as 512MB; anything else is left to the type's own check."""
    found = isinstance(value, str) and re.fullmatch(
        r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", value.strip().upper()
    )
    return int(float(found[1]) * UNITS[found[2] or ""]) if found else value


def _engine_fields() -> dict[str, Any]:  # Any: create_model's field definitions
    hints = get_type_hints(EngineConfig)
    found: dict[str, Any] = {}
    for option in fields(EngineConfig):
        if option.name in NO_ENGINE_OPTION:
            continue
        annotation: Any = hints[option.name] | None
        if option.name == "kv_bytes":
            annotation = Annotated[annotation, BeforeValidator(_bytes)]
        text = ENGINE_HELP.get(option.name, "")  # a test wants them all
        found[option.name] = (annotation, Field(default=None, description=text))
    return found


def _api_fields() -> dict[str, Any]:  # Any: create_model's field definitions
    hints = get_type_hints(ApiSettings)
    found: dict[str, Any] = {}
    for setting in fields(ApiSettings):
        annotation = hints[setting.name]
        if getattr(annotation, "__origin__", None) is tuple:
            annotation = types.GenericAlias(list, annotation.__args__[0])
        text = "As in deployments/api_settings.py."
        found[setting.name] = (annotation | None, Field(default=None, description=text))
    return found


EngineEntry: type[Entry] = create_model("EngineEntry", __base__=Entry, **_engine_fields())
ApiEntry: type[Entry] = create_model("ApiEntry", __base__=Entry, **_api_fields())


class PoolEntry(Entry):
    """Equal workers of a model."""

    name: str = Field(description="Of the pool; unique within its model.")
    num_cpus: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="CPUs of each worker, which are also its threads (rounded up); by default all "
        "that a node has free.",
    )
    num_gpus: float = Field(default=0, ge=0, description="GPUs of each worker.")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Ray's custom resources that each worker takes."
    )
    label_selector: dict[str, str] = Field(
        default_factory=dict,
        description="Labels that a node must have: `x`, `!x`, `in(x,y)` or `!in(x,y)` for each.",
    )
    accelerator_type: str | None = Field(
        default=None, description="Ray's name of the card that the node must have, such as H100."
    )
    min_workers: int = Field(
        default=1,
        ge=0,
        le=MOST_WORKERS,
        description="Workers that always run; with 0 the pool sleeps until it is needed.",
    )
    max_workers: int | None = Field(
        default=None,
        ge=1,
        le=MOST_WORKERS,
        description="Workers under load; min_workers by default. More: the pool is scaled "
        "(docs/autoscaling.md).",
    )
    price: float | None = Field(
        default=None,
        gt=0,
        description="Of one worker for an hour, in any currency, beside the other pools' prices; "
        "1 by default.",
    )
    cold_start_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds from the wish for a worker to its first token, node included; 60 by "
        "default. A request for a sleeping model is held for twice as long at most.",
    )
    max_surge_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Share of its workers that an update starts before it stops old ones, where "
        "there is room for them; by default a fifth of the pool is stopped first.",
    )
    engine: EngineEntry = Field(  # pyright: ignore[reportInvalidTypeForm]
        default_factory=EngineEntry, description="Engine options of this pool; they win."
    )


def _name(value: str) -> str:
    if not value or len(value) > MAX_NAME or not value.isprintable() or value != value.strip():
        raise ValueError(
            f"1 to {MAX_NAME} characters that can be printed, without blanks around them"
        )
    return value


ModelName = Annotated[str, AfterValidator(_name)]


def _pools_kind(value: object) -> str:
    return "word" if isinstance(value, str) else "list"


Pools = Annotated[
    Annotated[Literal["auto"], Tag("word")]
    | Annotated[list[PoolEntry], Field(min_length=1), Tag("list")],
    Discriminator(_pools_kind),
]


class ScalingEntry(Entry):
    """How the pools of a model follow its load."""

    target_queue_s: float | None = Field(
        default=None,
        gt=0,
        description="A new answer should not wait longer for a worker; 5 by default.",
    )
    scale_down_delay_s: float | None = Field(
        default=None,
        ge=0,
        description="A worker that was not wanted for so long is let go; 120 by default.",
    )
    max_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the workers' measured speed that what arrives may take; 0.75 by "
        "default.",
    )


class ModelEntry(Entry):
    """One model name and the pools that serve it."""

    model: str = Field(
        default="",
        description="Folder, .gguf file or hub id, the same on every node; SmolLM2-135M-Instruct "
        "if not given.",
    )
    name: ModelName | None = Field(
        default=None, description="That clients ask for; the model's own by default."
    )
    chat_template: str | None = Field(
        default=None, description="A jinja file, or the template itself."
    )
    engine: EngineEntry = Field(  # pyright: ignore[reportInvalidTypeForm]
        default_factory=EngineEntry, description="Engine options of all its pools."
    )
    pools: Pools = Field(
        description="List of pools, or `auto`: one for each kind of node that Ray sees."
    )
    prefer: list[str] | None = Field(
        default=None,
        description="Pools in the order in which they are filled; others come last. Without it, "
        "each request goes where it is expected to end first.",
    )
    spill: bool | None = Field(
        default=None,
        description="Whether the next preferred pool is used while the better ones are full; true "
        "by default. False: requests wait for the best pool that can serve them.",
    )
    scaling: ScalingEntry = Field(
        default_factory=ScalingEntry, description="How its pools follow the load."
    )


class GatewayEntry(Entry):
    """The gateway: one process that all requests pass."""

    num_cpus: float = Field(
        default=GATEWAY_CPUS, ge=0, description="CPUs that Ray counts for the gateway."
    )


class ServeEntry(Entry):
    """The whole file."""

    host: str | None = Field(default=None, description="Address to listen on; 127.0.0.1.")
    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None, description="Port to listen on; 8000, and 0 is any."
    )
    address: str | None = Field(
        default=None,
        description="Ray cluster to use, HOST:PORT or auto; without it, and without RAY_ADDRESS, "
        "a Ray of its own on this machine.",
    )
    gateway: GatewayEntry = Field(
        default_factory=GatewayEntry, description="The gateway's own place."
    )
    api: ApiEntry = Field(  # pyright: ignore[reportInvalidTypeForm]
        default_factory=ApiEntry, description="Limits of the HTTP API; docs/api.md explains each."
    )
    auth: AuthConfig = Field(
        default_factory=AuthConfig, description="API keys and their limits; docs/security.md."
    )
    models: list[ModelEntry] = Field(min_length=1, description="What is served.")
