"""Start-up of an engine, in order: probe, plan, load weights, KV pool, runners, self-check."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from .attention.loading import BackendUnusable
from .build_context import BuildContext
from .checkpoint.source import Checkpoint, open_checkpoint
from .config import EngineConfig
from .device_memory import DeviceMemory, device_memory
from .engine_parts import load_model, make_context, make_pool, make_runners
from .errors import EngineError
from .forward_mode import ForwardMode
from .kv.pages import Pages
from .kv.pool import KVPool
from .ladder import capture_graphs
from .measured import NO_STEP, Activations, of_a_step, with_measured
from .model_runner import ModelRunner
from .models.decoder import Decoder
from .planning.hardware import Hardware
from .planning.plan import ExecutionPlan
from .planning.planner import plan as make_plan
from .planning.probe import probe
from .self_check import SelfCheckError, bound_of, self_check
from .trial import has_own_pool, run_trial, with_measured_pool
from .weights import stored_bytes

logger = logging.getLogger(__name__)

Stage = Literal[
    "probe", "plan", "weights", "kv_pool", "graphs", "self_check", "memory", "calibration", "ready"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupEvent:
    """One line of progress. `fraction` of the stage done, 0 to 1; `seconds` it took, once done;
    `data` for displays.
    """

    stage: Stage
    message: str
    fraction: float | None = None
    seconds: float | None = None
    data: dict[str, object] | None = None


OnProgress = Callable[[StartupEvent], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Everything an engine is made of."""

    hardware: Hardware
    plan: ExecutionPlan
    checkpoint: Checkpoint
    model: Decoder
    kv: KVPool
    pages: Pages
    runner: ModelRunner


class _Stages:
    """Times each stage and tells whoever watches."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._tell = on_progress or (lambda event: None)
        self._began = time.monotonic()

    def progress(self, stage: Stage, message: str, fraction: float) -> None:
        self._tell(StartupEvent(stage=stage, message=message, fraction=fraction))

    def done(self, stage: Stage, message: str, data: dict[str, object] | None = None) -> None:
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        self._tell(
            StartupEvent(stage=stage, message=message, fraction=1.0, seconds=seconds, data=data)
        )

    def planned(self, plan: ExecutionPlan, failure: str = "") -> None:
        """`failure`: of the plan before this one."""
        name = plan.path_name(ForwardMode.DECODE)
        if failure:
            logger.warning("%s; starting again on %s", failure, name)
        self.done("plan", name, {"plan": plan.to_json()})


class _PathRefused(SelfCheckError):
    """The self-check refused what `plan` had become by then."""

    def __init__(self, message: str, plan: ExecutionPlan) -> None:
        super().__init__(message)
        self.plan = plan


YARDSTICK = {
    "runner": "eager",
    "attention_backend": "torch_sdpa",
    "ops": "torch",
    "linear_method": "dense",
}
"""The plain path, which the self-check compares with: the last that is left."""

FALLBACKS = ({}, {"runner": "eager"}, YARDSTICK)
"""What the self-check falls back to: the plan, the same kernels without graphs, the plain path."""


def start(
    config: EngineConfig,
    *,
    on_progress: OnProgress | None = None,
    cores_given: float | None = None,
    checkpoint: Checkpoint | None = None,
) -> Started:
    """Build all parts. Raises ModelError and PlanError before any weight is read. `cores_given`:
    CPUs that Ray gave this process, where Ray counts; `checkpoint`: one that is open already.

    A path that fails the self-check is taken out, which the plan's events say, and the next of
    `FALLBACKS` takes its place. EngineError when that fails too, or when the user named what
    failed.
    """
    stages = _Stages(on_progress)
    hardware = probe().with_cores_given(cores_given)
    found = f"{hardware.device_name}, {hardware.cpu.cores_usable} cores"
    stages.done("probe", found, {"hardware": hardware.to_json()})
    checkpoint = checkpoint or open_checkpoint(config.model)
    plan = make_plan(hardware, checkpoint.config, config)
    stages.planned(plan)
    failure = ""
    for wishes in FALLBACKS:
        if failure:
            following = _plan_without(failure, wishes, config, hardware, checkpoint, plan)
            if following is None:
                continue
            plan = following
            stages.planned(plan, failure)
        try:
            return _build_what_loads(config, hardware, checkpoint, plan, stages)
        except _PathRefused as error:
            failure, plan = str(error), error.plan
    raise EngineError(
        f"{failure}; no other path is left on this node, so the worker does not start. "
        "The model's files may be damaged; `--no-self-check` starts it all the same"
    )


def _build_what_loads(
    config: EngineConfig,
    hardware: Hardware,
    checkpoint: Checkpoint,
    plan: ExecutionPlan,
    stages: _Stages,
) -> Started:
    """`_build`, planned anew without the packages of a backend that does not load. PlanError where
    the user named it, _PathRefused where nothing else is left to plan.
    """
    try:
        return _build(config, hardware, checkpoint, plan, stages)
    except BackendUnusable as error:
        failure, packages = str(error), error.packages
    if not packages:
        raise _PathRefused(failure, plan)
    hardware = hardware.without_packages(packages, failure)
    following = make_plan(hardware, checkpoint.config, config)
    if following.paths == plan.paths:
        raise _PathRefused(failure, plan)
    plan = replace(following, events=plan.events).with_event("attention", failure)
    stages.planned(plan, failure)
    return _build_what_loads(config, hardware, checkpoint, plan, stages)


def _build(
    config: EngineConfig,
    hardware: Hardware,
    checkpoint: Checkpoint,
    plan: ExecutionPlan,
    stages: _Stages,
) -> Started:
    """Load and check one plan. Raises _PathRefused."""
    context = make_context(checkpoint.config, plan)
    model, weight_bytes = _load(checkpoint, plan, context, stages)
    memory = device_memory(context.device)
    plan, activations = _try_step(config, plan, model, context, memory)
    kv, pages = make_pool(checkpoint.config, plan)
    stages.done("kv_pool", f"{pages.num_usable} pages of {plan.page_size} tokens")
    with _meanwhile(kv.touch):
        runners = make_runners(model, kv, plan, context)
        for note in context.notes:
            plan = plan.with_event("attention", note)
        rung = capture_graphs(runners, plan)
    runner, plan = ModelRunner(rung.runners), rung.plan
    if plan.capture_sizes:
        stages.done("graphs", plan.path_name(ForwardMode.DECODE))
    plan = _check(config, model, runner, pages, plan, stages)
    plan = with_measured(plan, weight_bytes, kv, rung.runners.values(), memory, activations)
    stages.done("memory", "; ".join(e.message for e in plan.events if e.stage == "memory"))
    return Started(
        hardware=hardware,
        plan=plan,
        checkpoint=checkpoint,
        model=model,
        kv=kv,
        pages=pages,
        runner=runner,
    )


@contextmanager
def _meanwhile(call: Callable[[], None]) -> Iterator[None]:
    """`call` runs on a thread of its own, and has ended when the body has."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load(
    checkpoint: Checkpoint, plan: ExecutionPlan, context: BuildContext, stages: _Stages
) -> tuple[Decoder, int]:
    """The model, and how many bytes its weights take."""
    told = partial(stages.progress, "weights", checkpoint.name)
    model = load_model(checkpoint, plan, context, told)
    num_bytes = stored_bytes(checkpoint.config, model.weights)
    storage = plan.dtype if plan.linear_method == "dense" else plan.linear_method
    text = f"{checkpoint.name}, {num_bytes / 1e6:.0f} MB as {storage}"
    stages.done("weights", text, {"bytes": num_bytes})
    return model, num_bytes


def _plan_without(
    failure: str,
    wishes: dict[str, str],
    config: EngineConfig,
    hardware: Hardware,
    checkpoint: Checkpoint,
    failed: ExecutionPlan,
) -> ExecutionPlan | None:
    """The plan with plainer choices in place of what the planner had chosen by itself; None where
    that is what has failed.
    """
    auto = {name: plain for name, plain in wishes.items() if getattr(config, name) == "auto"}
    if config.quantization != "auto":
        auto.pop("linear_method", None)  # the plain method has not the bits that were asked for
    plan = make_plan(hardware, checkpoint.config, replace(config, **auto))
    if (plan.paths, plan.linear_method) == (failed.paths, failed.linear_method):
        return None
    origins = plan.origins | {name: failed.origins[name] for name in auto}
    plan = replace(plan, origins=origins, events=failed.events)
    return plan.with_event("self_check", f"{failure}: that path was taken out")


def _try_step(
    config: EngineConfig,
    plan: ExecutionPlan,
    model: Decoder,
    context: BuildContext,
    memory: DeviceMemory | None,
) -> tuple[ExecutionPlan, Activations | None]:
    """On a card: run a largest step, and give the pool what is measured to be left. A step that
    fails leaves the pool as planned, with a warning: whether the path is sound is asked later.
    """
    if memory is None:
        return plan, None
    is_ours = has_own_pool(plan, config)
    quiet = replace(context, notes=[])  # the builders will say it again
    try:
        trial = run_trial(
            plan, model, memory, lambda kv: make_runners(model, kv, plan, quiet), captures=is_ours
        )
    except (EngineError, RuntimeError, MemoryError) as error:
        logger.warning("a largest step failed before the KV pool was made", exc_info=error)
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        plan = plan.with_event(
            "kv_pool", f"warning: a largest step failed ({why}); the pool is as planned"
        )
        trial = None
    if trial is None:  # and the error with its frames is gone, which held that step's tensors
        memory.free_bytes()
        return plan, NO_STEP
    if is_ours:
        plan = with_measured_pool(plan, trial, config)
    return plan, of_a_step(trial.step_bytes)


def _check(
    config: EngineConfig,
    model: Decoder,
    runner: ModelRunner,
    pages: Pages,
    plan: ExecutionPlan,
    stages: _Stages,
) -> ExecutionPlan:
    """Run the self-check and record it in the plan's events."""
    if not config.self_check:
        return plan.with_event("self_check", "skipped, as asked")
    result = self_check(
        model, runner, pages, bound=bound_of(plan), max_model_len=plan.max_model_len
    )
    if not result.passed:
        path = plan.path_name(ForwardMode.DECODE)
        raise _PathRefused(f"{path}: {result.sentence()}", plan)
    plan = plan.with_event("self_check", result.sentence())
    stages.done("self_check", result.sentence(), {"error": result.error, "bound": result.bound})
    return plan
