"""Finds the first layer and operation where two execution paths part, on graphs as well as eager.

Both run the same tokens, with taps after every operation. A second run of path b starts each
operation from what path a had before it: there errors do not pile up, so what parts is at fault
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .checkpoint.source import Checkpoint, open_checkpoint
from .config import EngineConfig
from .errors import ConfigurationError
from .planning.plan import ExecutionPlan
from .planning.planner import plan as make_plan
from .planning.probe import probe
from .self_check import BOUNDS, bound_of
from .tapped_path import TappedPath, load_path, named_path
from .taps import TapName

COPIES = 2  # of the sequence, one step apart: so there are prefill, mixed and decode steps
LINEAR = ("embedding", "qkv", "o", "gate_up", "down", "lm_head")
Values = dict[TapName, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The largest difference of one operation's results over all steps."""

    largest: float  # absolute
    relative: float  # to the largest value that path a has in the same step
    mode: str  # of the step
    step: int

    def meets(self, bound: float) -> bool:
        """Whether it is within a bound on the relative difference."""
        return self.relative <= bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One operation: the gap when each path goes on from its own values, and when b goes on from
    a's.
    """

    layer: int | None
    operation: str
    own: Gap
    bound: float
    same: Gap
    same_bound: float

    @property
    def parts(self) -> bool:
        """Whether the paths differ here by more than a bound."""
        return not (self.own.meets(self.bound) and self.is_faultless)

    @property
    def is_faultless(self) -> bool:
        """Whether it stays within its bound when it starts from the same values."""
        return self.same.meets(self.same_bound)

    @property
    def place(self) -> str:
        """Such as "layer 2 silu_mul"."""
        return self.operation if self.layer is None else f"layer {self.layer} {self.operation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PathDiff:
    """Two paths compared, operation by operation in the order in which they run."""

    a: dict[str, str]  # mode -> path, as it ran
    b: dict[str, str]
    linear_methods: tuple[str, str]
    dtypes: tuple[str, str]
    tokens: int
    steps: int
    same_choices: int  # rows whose likeliest token is the same, of `choices`
    choices: int
    rows: tuple[Row, ...]

    @property
    def parted(self) -> Row | None:
        """The first operation that differs from the same values by more than its bound; where
        there is none but the logits are beyond theirs, the first that differs from its own.

        Rounding to few bits lets values inside differ by more than the logits in the end do.
        """
        at_fault = [row for row in self.rows if not row.is_faultless]
        if at_fault:
            return at_fault[0]
        if self.logits.own.meets(self.logits.bound):
            return None
        return next(row for row in self.rows if row.parts)

    @property
    def logits(self) -> Row:
        """The last operation."""
        return self.rows[-1]

    def verdict(self) -> str:
        """One sentence."""
        row = self.parted
        if row is None:
            worst = max(self.rows, key=lambda row: row.own.relative / row.bound)
            if worst.own.relative == 0.0:
                return "the paths agree bit for bit in every operation"
            return (
                f"the paths agree within the bound: logits differ by "
                f"{self.logits.own.relative:.1e} of the largest (bound {self.logits.bound:.0e}), "
                f"and what differs most on the way is {worst.place}, by {worst.own.relative:.1e}"
            )
        if row.is_faultless:
            gap, bound = row.own, row.bound
            why = (
                "errors before it have piled up: from the same values it differs by "
                f"{row.same.relative:.1e}"
            )
        else:
            gap, bound, why = row.same, row.same_bound, "it does so from the same values"
        return (
            f"the paths part in {row.place}, {gap.mode} step {gap.step}: {gap.relative:.1e} of the "
            f"largest value (bound {bound:.0e}); {why}"
        )


def diff(
    config: EngineConfig,
    a: str,
    b: str,
    *,
    prompt: str | None = None,
    prompt_tokens: int = 16,
    decodes: int = 4,
) -> PathDiff:
    """Run the same tokens on both paths. Raises ConfigurationError for paths or sizes that cannot
    be, EngineError where a path cannot run as named.
    """
    checkpoint = open_checkpoint(config.model)
    ids = _prompt_ids(checkpoint, prompt, prompt_tokens)
    steps = _steps(len(ids), decodes)
    length = len(ids) + decodes
    max_tokens = max(map(sum, steps))
    sized = replace(
        config,
        max_model_len=length + 1,
        max_num_seqs=COPIES,
        max_num_batched_tokens=max_tokens,
        prefix_cache=False,
    )
    hardware = probe()
    plans = [make_plan(hardware, checkpoint.config, named_path(text, sized)) for text in (a, b)]
    first = load_path(checkpoint, plans[0], None)
    second = load_path(checkpoint, plans[1], first)
    paths = [
        TappedPath(loaded, copies=COPIES, length=length, max_tokens=max_tokens, forced=forced)
        for loaded, forced in ((first, False), (second, False), (second, True))
    ]
    compared = _Comparison()
    with torch.inference_mode():
        for counts in steps:
            compared.step(*paths, counts=counts, ids=ids)
    return PathDiff(
        a=_path_names(plans[0]),
        b=_path_names(plans[1]),
        linear_methods=(plans[0].linear_method, plans[1].linear_method),
        dtypes=(plans[0].dtype, plans[1].dtype),
        tokens=length,
        steps=len(steps),
        same_choices=compared.same_choices,
        choices=compared.choices,
        rows=compared.rows(plans[0], plans[1]),
    )


class _Comparison:
    """The worst gap of each operation so far, in both runs."""

    def __init__(self) -> None:
        self.same_choices = 0
        self.choices = 0
        self._steps = 0
        self._own: dict[TapName, Gap] = {}
        self._same: dict[TapName, Gap] = {}

    def step(
        self,
        a: TappedPath,
        b: TappedPath,
        forced: TappedPath,
        counts: Sequence[int],
        ids: list[int],
    ) -> None:
        """Run one step on all three; `ids` grows by a's choice where the first copy is at the end
        of it.
        """
        batch, logits, _ = a.run(counts, ids)
        choices = logits.argmax(dim=-1)
        expected = a.values()
        forced.take_past(a)
        forced.taps.give(expected)
        _, others, _ = b.run(counts, ids)
        self.same_choices += int((others.argmax(dim=-1).cpu() == choices.cpu()).sum())
        self.choices += len(choices)
        forced.run(counts, ids)
        mode = batch.mode.value
        _note(self._own, expected, b.values(), mode, self._steps)
        _note(self._same, expected, forced.values(), mode, self._steps)
        self._steps += 1
        if counts[0] and batch.kv_lens[0] == len(ids):
            ids.append(int(choices[batch.query_starts[1] - 1]))

    def rows(self, a: ExecutionPlan, b: ExecutionPlan) -> tuple[Row, ...]:
        """In order of the operations."""
        bound = max(bound_of(a), bound_of(b))
        plain = max(BOUNDS[dtype] for p in (a, b) for dtype in (p.dtype, p.kv_dtype))
        return tuple(
            Row(
                layer=name.layer,
                operation=name.operation,
                own=gap,
                bound=bound,
                same=self._same[name],
                same_bound=bound if name.operation in LINEAR else plain,
            )
            for name, gap in self._own.items()
        )


def _note(worst: dict[TapName, Gap], expected: Values, found: Values, mode: str, step: int) -> None:
    for name, value in expected.items():
        difference = (found[name].to(value.device) - value).abs().max()
        largest = float(difference.nan_to_num(nan=torch.inf))
        scale = max(float(value.abs().max()), 1e-30)
        gap = Gap(largest=largest, relative=largest / scale, mode=mode, step=step)
        if name not in worst or gap.relative > worst[name].relative:
            worst[name] = gap


def _path_names(plan: ExecutionPlan) -> dict[str, str]:
    return {str(mode): path.name for mode, path in plan.paths.items()}


def _prompt_ids(checkpoint: Checkpoint, prompt: str | None, num_tokens: int) -> list[int]:
    """The prompt's tokens, or as many drawn at random, the same each time."""
    if prompt is not None:
        ids = checkpoint.tokenizer().encode(prompt)
        if not ids:
            raise ConfigurationError("the prompt has no token; give a longer one")
        return list(ids)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        0, checkpoint.config.vocab_size, (num_tokens,), generator=generator
    ).tolist()


def _steps(prompt_tokens: int, decodes: int) -> list[tuple[int, ...]]:
    """Tokens of each copy in each step: the prompt in two parts, then decodes, each copy one step
    behind the one before.
    """
    cut = (prompt_tokens + 1) // 2
    chunks = [cut, *([prompt_tokens - cut] if prompt_tokens > cut else []), *[1] * decodes]
    late = COPIES - 1
    columns = [[*[0] * i, *chunks, *[0] * (late - i)] for i in range(COPIES)]
    return list(zip(*columns, strict=True))
