"""How long, how many and how large: context, batch and KV pool, within what the memory leaves.

The KV pool, unless `--kv-bytes` gives it: on a CPU, tokens for `max_num_seqs` requests of 1,024
tokens and at least one of the whole context; on a card, all it may take. At most `memory_share`
(0.5 on a CPU, 0.9 on a card) of what weights, activations and reserve leave; only the least a plan
must hold may go beyond the default share. The pool's memory is touched as pages are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import EngineConfig, ModelConfig
from ..errors import PlanError
from ..linear import registry as linear
from .candidate import find
from .capability import ALL_DTYPES
from .capture_sizes import captures_of
from .memory import ITEMSIZE, KV_ITEMSIZE, SCRATCH_PAGES, Budget, Demand, gigabytes
from .plan import MemoryEstimate, Origin
from .refusal import Refusal
from .selection import REGISTRIES, Selection

DEFAULTS = {
    "cpu": {"max_num_seqs": 32, "max_num_batched_tokens": 512, "memory_share": 0.5},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "memory_share": 0.9},
}
MAX_WAITING = 256
USEFUL_LEN = 1024  # tokens of a request that the default pool on a CPU counts with
LEAST_LEN = 512  # tokens; a plan that cannot hold this much context is refused, unless asked for


@dataclass(slots=True)
class Sizes:
    """The sizes of a plan, with the origin of each and sentences for its notes."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    num_pages: int
    memory: MemoryEstimate
    capture_sizes: tuple[int, ...] = ()
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Everything the size rules look at."""

    model: ModelConfig
    config: EngineConfig
    device: str
    demand: Demand
    budget: Budget

    @property
    def wished_len(self) -> int:
        """Context that was asked for, or the model's own."""
        return self.config.max_model_len or self.model.max_position

    @property
    def least_len(self) -> int:
        """Context without which there is no plan."""
        if self.config.max_model_len is not None:
            return self.config.max_model_len
        return 1 if self.config.kv_bytes is not None else min(LEAST_LEN, self.model.max_position)

    @property
    def share(self) -> float:
        """Part of the memory left that the pool may take."""
        return memory_share(self.config, self.device)


def memory_share(config: EngineConfig, device: str) -> float:
    """As asked, else the default of that kind of device."""
    default = DEFAULTS[device]["memory_share"]
    return default if config.memory_share is None else config.memory_share


def choose_sizes(
    model: ModelConfig, config: EngineConfig, selection: Selection, budget: Budget
) -> Sizes:
    """Sizes within the budget; PlanError with the numbers where none are."""
    notes: list[str] = []
    device = selection.situation.device
    num_seqs, num_tokens = _batch(config, device, notes)
    demand = _demand(model, selection, num_seqs, num_tokens)
    question = Question(model=model, config=config, device=device, demand=demand, budget=budget)
    _refuse_longer_than_model(question)
    max_model_len, num_pages = _given_pool(question) if config.kv_bytes else _own_pool(question)
    estimate = demand.estimate(max_model_len, num_pages, budget)
    _refuse_over_limit(question, estimate)
    sizes = Sizes(
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        max_waiting=config.max_waiting or MAX_WAITING,
        num_pages=num_pages,
        memory=estimate,
        capture_sizes=demand.decode_sizes,
        notes=notes,
    )
    _explain(question, sizes)
    return sizes


def _demand(model: ModelConfig, selection: Selection, num_seqs: int, num_tokens: int) -> Demand:
    situation, captures = selection.situation, captures_of(selection)
    decode_sizes = captures.decode_sizes(num_seqs)
    backends = {path.attention_backend for path in selection.paths.values()}
    return Demand(
        model=model,
        itemsize=ITEMSIZE[situation.dtype],
        kv_itemsize=KV_ITEMSIZE[situation.kv_dtype],
        page_size=situation.page_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        method=find(linear.CANDIDATES, selection.linear_method).capability,
        width=selection.width,
        decode_sizes=decode_sizes,
        piece_sizes=captures.piece_sizes(num_tokens),
        is_padded=captures.is_padded,
        is_loaded_here=situation.device == "cpu",
        is_gathered=situation.device == "cpu" or "torch_sdpa" in backends,
        workspace_bytes=sum(_workspace_bytes(model, name, len(decode_sizes)) for name in backends),
        is_split="triton" in backends,
    )


def _workspace_bytes(model: ModelConfig, backend: str, num_captured: int) -> int:
    """Of an attention backend that plans each batch: for decode steps, for others and for each
    captured size it keeps a plan of its own, one a window.
    """
    capability = find(REGISTRIES["attention"], backend).capability
    windows = len(set(model.layer_windows or (None,)))
    return capability.workspace_bytes + capability.plan_bytes * windows * (2 + num_captured)


def _batch(config: EngineConfig, device: str, notes: list[str]) -> tuple[int, int]:
    """(requests at once, tokens a step): every running request needs at least one token a step."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is not None and tokens is not None and tokens < seqs:
        raise _error(
            "sizes.batch",
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}; every running "
            "request needs one token of each step",
            f"--max-num-batched-tokens {seqs} or more, or --max-num-seqs {tokens} or fewer",
        )
    default_seqs = int(DEFAULTS[device]["max_num_seqs"])
    default_tokens = int(DEFAULTS[device]["max_num_batched_tokens"])
    if tokens is not None and seqs is None and tokens < default_seqs:
        notes.append(f"max_num_seqs is {tokens}: a step has no more tokens than that")
    if seqs is not None and tokens is None and seqs > default_tokens:
        notes.append(f"max_num_batched_tokens is {seqs}: one for each running request")
    return (
        seqs or min(default_seqs, tokens or default_seqs),
        tokens or max(default_tokens, seqs or 0),
    )


def _refuse_longer_than_model(question: Question) -> None:
    wished, most = question.wished_len, question.model.max_position
    if wished > most:
        raise _error(
            "sizes.max_model_len",
            f"--max-model-len {wished} is more than the {most} tokens this model was made for",
            f"--max-model-len {most} or less",
        )


def _given_pool(question: Question) -> tuple[int, int]:
    """(context, pages) of a pool of `--kv-bytes`."""
    demand, given = question.demand, question.config.kv_bytes
    assert given is not None, "the pool is given"
    num_pages, needed = given // demand.page_bytes, demand.pages_for(question.least_len)
    if num_pages < needed:
        raise _error(
            "sizes.kv_bytes",
            f"--kv-bytes {given} holds {num_pages} pages of {demand.page_bytes} bytes "
            f"({demand.page_size} tokens); {question.least_len} tokens need {needed} with the "
            "scratch page",
            f"--kv-bytes {needed * demand.page_bytes} or more",
        )
    usable = (num_pages - SCRATCH_PAGES) * demand.page_size
    return min(question.wished_len, usable), num_pages


def _own_pool(question: Question) -> tuple[int, int]:
    """(context, pages) that the rule at the top of this file gives."""
    demand = question.demand
    max_model_len = _longest(question)
    num_pages = _pages_allowed(question, max_model_len)
    if question.device == "cpu":
        tokens = max(demand.max_num_seqs * USEFUL_LEN, max_model_len)
        num_pages = min(num_pages, demand.pages_for(tokens))
    return max_model_len, max(num_pages, demand.pages_for(question.least_len))


def _longest(question: Question) -> int:
    """The longest context up to the wished one whose pages are allowed; at least the least."""
    low, high = question.least_len, question.wished_len
    while low < high:
        middle = (low + high + 1) // 2
        if _pages_allowed(question, middle) >= question.demand.pages_for(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _pages_allowed(question: Question, max_model_len: int) -> int:
    """Pages within the share of what a context of that length leaves."""
    demand, budget = question.demand, question.budget
    if budget.limit_bytes is None:
        return demand.pages_for(max(demand.max_num_seqs * USEFUL_LEN, max_model_len))
    left = budget.limit_bytes - budget.reserve_bytes - demand.fixed_bytes(max_model_len)
    return demand.pages_within(int(question.share * left))


def _refuse_over_limit(question: Question, estimate: MemoryEstimate) -> None:
    limit = estimate.limit_bytes
    if limit is None or estimate.total_bytes <= limit:
        return
    raise _error(
        "memory",
        f"the model does not fit: weights {gigabytes(estimate.weights_bytes)}"
        f"{_dequantized(question)}, KV pool {gigabytes(estimate.kv_bytes)}, activations "
        f"{gigabytes(estimate.activation_bytes)}, graphs {gigabytes(estimate.graph_bytes)} and "
        f"reserve {gigabytes(estimate.reserve_bytes)} are {gigabytes(estimate.total_bytes)}; "
        f"there are {gigabytes(limit)} ({estimate.limit_origin})",
        f"{gigabytes(estimate.total_bytes)} of free memory",
    )


def _dequantized(question: Question) -> str:
    """Where blocks of few bits become floats: what they were."""
    model, method = question.model, question.demand.method
    if model.stored_dtype in ALL_DTYPES or method.native_kernels or method.quantizes:
        return ""
    return f" (dequantized from {gigabytes(model.weight_bytes)} of {model.stored_dtype})"


def _explain(question: Question, sizes: Sizes) -> None:
    """Fill origins, and notes for what was cut."""
    config = question.config
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
        sizes.origins[name] = "default" if getattr(config, name) is None else "user"
    sizes.origins["kv_bytes"] = sizes.origins["num_pages"] = _pool_origin(question, sizes)
    if config.max_model_len is not None:
        sizes.origins["max_model_len"] = "user"
    elif sizes.max_model_len == question.model.max_position:
        sizes.origins["max_model_len"] = "model"
    else:
        sizes.origins["max_model_len"] = sizes.origins["kv_bytes"]
        sizes.notes.append(
            f"max_model_len is cut from the model's {question.model.max_position} to "
            f"{sizes.max_model_len} tokens: the KV pool of {gigabytes(sizes.memory.kv_bytes)} "
            "holds no more"
        )
    if question.budget.limit_bytes is None:
        sizes.notes.append("memory of this device is unknown: nothing was checked against it")


def _pool_origin(question: Question, sizes: Sizes) -> Origin:
    """The user where the pool or its share was given; the default tokens, or what memory left."""
    if question.config.kv_bytes is not None or question.config.memory_share is not None:
        return "user"
    is_default = sizes.num_pages >= question.demand.pages_for(sizes.max_num_seqs * USEFUL_LEN)
    return "default" if question.device == "cpu" and is_default else "hardware"


def _error(rule: str, sentence: str, lift: str) -> PlanError:
    refusal = Refusal(rule=rule, kind="unavailable", sentence=sentence, lift=lift)
    return PlanError(f"{sentence}. What would work: {lift}.", [refusal], lift)
