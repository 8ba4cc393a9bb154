"""The tables of docs/paths.md, made from the capability records, lists and rules.

`python -m polypath.runtime.planning.tables docs/paths.md` writes them into the page; a test fails
when the page says something else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..forward_mode import ForwardMode
from .capability import STEP_MODES, CandidateKind, Capability
from .device import CARD_RULES, DEVICE_RULES
from .dtypes import DTYPE_RULES
from .priorities import CPU_CLASSES, GPU_CLASSES, PRIORITIES
from .rules import RULES, why_not_together
from .rules_model import PAIR_RULES
from .selection import REGISTRIES

OTHER_RULES = (
    (
        "memory",
        "unavailable",
        "a plan that takes more than there is, with the numbers and what would fit",
        "SGLang #14476, #8538; vLLM #15039: out of memory at capture",
    ),
    (
        "sizes.batch, sizes.max_model_len, sizes.kv_bytes, num_threads",
        "unavailable",
        "sizes that contradict each other, the model or the node",
        "dynamo #8609: a context smaller than a bucket crashes",
    ),
    (
        "rank",
        "performance",
        "what fits and stands below another on its list",
        "SGLang #5064, #4865: what is the policy of defaults?",
    ),
)
"""Refusals that no rule of a table gives."""

Row = Sequence[str]
Feature = tuple[str, Callable[[Capability], str]]


def _words(found: Iterable[object] | None, otherwise: str = "any") -> str:
    if found is None:
        return otherwise
    return ", ".join(map(str, found)) or "none"


def _sizes(found: tuple[int, ...] | None) -> str:
    if found is not None and len(found) > 8:
        return f"{found[0]} to {found[-1]}, every {found[1] - found[0]}"
    return _words(found)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _cards(record: Capability) -> str:
    low, high = record.min_compute_capability, record.max_compute_capability
    if "cuda" not in record.devices:
        return "none"
    ends = [f"{bound[0]}.{bound[1]}" if bound is not None else "" for bound in (low, high)]
    return "any" if not any(ends) else " to ".join(ends).strip() if ends[1] else f"from {ends[0]}"


def _needs(record: Capability) -> str:
    parts = [f"`{name}`" for name in record.packages]
    parts += [" or ".join(f"`{carrier.package}`" for carrier in record.carriers)] * bool(
        record.carriers
    )
    parts += ["nvcc or built kernels"] if record.needs_nvcc else []
    parts += ["a C++ compiler at start"] if record.needs_compiler else []
    parts += ["native kernels"] if record.native_kernels else []
    parts += [f"{' '.join(record.required_isa)}"] if record.required_isa else []
    parts += [f"{' or '.join(record.architectures)}"] if record.architectures else []
    return ", ".join(parts) or "nothing"


def _dtypes(record: Capability) -> str:
    narrower = [f"on {device} {_words(types)}" for device, types in record.dtypes_on_device]
    return "; ".join([_words(record.dtypes), *narrower])


def _drafts(record: Capability) -> str:
    if record.draft_width == 1:
        return "no"
    return f"{record.draft_width} tokens" + (", trees" if record.draft_trees else "")


GENERAL: tuple[Feature, ...] = (
    ("devices", lambda record: _words(record.devices)),
    ("compute capability", _cards),
    ("computes in", _dtypes),
)
ATTENTION: tuple[Feature, ...] = (
    *GENERAL,
    ("keys and values in", lambda record: _words(record.kv_dtypes, "its own type")),
    ("tokens a page", lambda record: _sizes(record.page_sizes)),
    ("head dimensions", lambda record: _sizes(record.head_dims)),
    ("query heads a KV head", lambda record: str(record.max_group_size or "any")),
    ("sliding window", lambda record: _yes(record.sliding_window)),
    ("soft cap", lambda record: _yes(record.soft_cap)),
    ("attention sinks", lambda record: _yes(record.attention_sinks)),
    ("drafted tokens in a step", _drafts),
    ("inside graphs", lambda record: record.graph_support),
)
RUNNER: tuple[Feature, ...] = (
    ("devices", lambda record: _words(record.devices)),
    ("modes", lambda record: _words(record.modes)),
    ("attention inside the graph", lambda record: _yes(record.captures_attention)),
    ("captures native kernels only", lambda record: _yes(record.captures_native)),
)
LINEAR: tuple[Feature, ...] = (
    *GENERAL,
    ("keeps as stored", lambda record: _words(record.keeps_stored)),
    ("repacks", lambda record: _words(record.repacks)),
    ("`--quantization`", lambda record: _words(record.quantizes)),
)
LAST: tuple[Feature, ...] = (
    ("batch-invariant", lambda record: _yes(record.batch_invariant)),
    ("needs", _needs),
    ("in this version", lambda record: _yes(record.built)),
)


def candidates_table(kind: CandidateKind, features: Sequence[Feature]) -> str:
    """One column for each candidate of a kind, one row for each feature."""
    records = [candidate.capability for candidate in REGISTRIES[kind]]
    last = LAST[1:] if kind == "runner" else LAST
    rows = [[name, *(say(record) for record in records)] for name, say in (*features, *last)]
    return _table(["", *(f"`{record.name}`" for record in records)], rows)


def pairs_table() -> str:
    """Which runner takes which attention backend, and in which modes."""
    runners = [candidate.capability for candidate in REGISTRIES["runner"]]
    backends = [candidate.capability for candidate in REGISTRIES["attention"]]
    rows = [[f"`{b.name}`", *(_pair(runner, b) for runner in runners)] for b in backends]
    return _table(["", *(f"`{runner.name}`" for runner in runners)], rows)


def _pair(runner: Capability, backend: Capability) -> str:
    if not set(runner.devices) & set(backend.devices):
        return "other device"
    modes: list[ForwardMode] = [
        mode
        for mode in STEP_MODES
        if mode in runner.modes and why_not_together(runner, [backend], mode) is None
    ]
    return _words(modes, "") if modes else "no"


def priorities_table() -> str:
    """The lists, best first."""
    kinds: tuple[CandidateKind, ...] = ("attention", "runner", "ops", "linear")
    rows = [
        [f"`{name}`", which, *(", ".join(PRIORITIES[kind][name]) for kind in kinds)]
        for name, which in (GPU_CLASSES | CPU_CLASSES).items()
    ]
    return _table(["class", "devices", *kinds], rows)


def rules_table() -> str:
    """Every rule with its class, what it refuses, and who taught it."""
    rules = (*DEVICE_RULES, *CARD_RULES, *DTYPE_RULES, *RULES, *PAIR_RULES)
    rows = [[f"`{each.id}`", each.kind, each.refuses, each.source] for each in rules]
    rows += [[", ".join(f"`{i}`" for i in r[0].split(", ")), *r[1:]] for r in OTHER_RULES]
    return _table(["rule", "class", "refuses", "taught by"], rows)


def _table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "attention": lambda: candidates_table("attention", ATTENTION),
    "runners": lambda: candidates_table("runner", RUNNER),
    "pairs": pairs_table,
    "ops": lambda: candidates_table("ops", GENERAL),
    "linear": lambda: candidates_table("linear", LINEAR),
    "lists": priorities_table,
    "rules": rules_table,
}
PLACE = re.compile(r"(<!-- table (\w+)[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda place: f"{place[1]}{TABLES[place[2]]()}\n{place[3]}", page)


def main(arguments: Sequence[str]) -> None:
    """Write the tables into the page that is named, or print them."""
    if not arguments:
        print("\n\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()))
        return
    page = Path(arguments[0])
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
