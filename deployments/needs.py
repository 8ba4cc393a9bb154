"""What a request needs of a worker, and why a worker cannot serve it: the router's hard filter.

The header `x-polypath-require` is a list of terms joined by commas (docs/routing.md has examples):

    term = "deterministic" / key ("=" / "!=") value *("|" value)
    key  = [mode "."] ("runner" / "attention" / "ops")      mode: decode (default), prefill, mixed
         / "device" / "dtype" / "kv_dtype" / "linear" / "quantization" / "native"
         / "pool" / "worker" / "plan" / "label." name
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..runtime.errors import RequestError
from .served_worker import Worker

HEADER = "x-polypath-require"
MAX_TERMS = 16
NAME = re.compile(r"[A-Za-z0-9_.:/+\-]{1,128}")
PATH_KEYS = {"runner": "runner", "attention": "attention_backend", "ops": "ops"}
PLAN_KEYS = {
    "device": "device",
    "dtype": "dtype",
    "kv_dtype": "kv_dtype",
    "linear": "linear_method",
    "quantization": "quantization",
    "native": "native_kernels",
}
OWN_KEYS = ("pool", "worker", "plan")
MODES = ("decode", "prefill", "mixed")
KNOWN = ", ".join(("deterministic", *PATH_KEYS, *PLAN_KEYS, *OWN_KEYS, "label.NAME"))


@dataclass(frozen=True, slots=True)
class Requirement:
    """One term: the value of `key` is, or (`is_not`) is not, among `values`."""

    key: str
    values: tuple[str, ...]
    is_not: bool = False

    def __str__(self) -> str:
        return f"{self.key}{'!=' if self.is_not else '='}{'|'.join(self.values)}"

    def why_not(self, worker: Worker) -> str | None:
        """What the worker has instead, or None when it meets this."""
        return self.judge(_value(worker, self.key))

    def judge(self, found: str | None) -> str | None:
        """The same of a value; None stands for one that is not known."""
        if (found in self.values) != self.is_not:
            return None
        has = "is not known" if found is None else f"is {found}"
        return f"{self.key} {has}, not {str(self).removeprefix(self.key).lstrip('=')}"


def _value(worker: Worker, key: str) -> str | None:
    if key.startswith("label."):
        return worker.labels.get(key.removeprefix("label."))
    if key in OWN_KEYS:
        return {"pool": worker.pool, "worker": worker.id, "plan": worker.fingerprint}[key]
    if key in PLAN_KEYS:
        value = worker.plan_value(PLAN_KEYS[key])
    else:
        mode, _, part = key.rpartition(".")
        paths = worker.plan_value("paths")
        path = paths.get(mode or "decode") if isinstance(paths, dict) else None
        value = (path or {}).get(PATH_KEYS[part])
    return None if value is None else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a worker must have; `why_not` asks one."""

    num_tokens: int = 1  # of prompt and answer together
    features: frozenset[str] = frozenset()
    requirements: tuple[Requirement, ...] = ()
    is_deterministic: bool = False
    continues: Worker | None = None  # whose answer must go on without any change

    def why_not(self, worker: Worker) -> list[str]:
        """Everything that the worker lacks; empty when it can serve the request."""
        lacks: list[str] = []
        if worker.max_model_len < self.num_tokens:
            lacks.append(f"it holds {worker.max_model_len} tokens of {self.num_tokens}")
        lacks += [f"it has no {name}" for name in sorted(self.features - worker.features)]
        if self.is_deterministic and not worker.is_batch_invariant:
            lacks.append("its paths are not all batch invariant")
        lacks += [why for need in self.requirements if (why := need.why_not(worker)) is not None]
        if self.continues is not None and self.continues.resume_class != worker.resume_class:
            lacks.append(f"it would not go on exactly as {self.continues.id} did")
        return lacks

    def with_requirements(self, requirements: tuple[Requirement, ...]) -> Needs:
        """The same with other terms of the header."""
        return replace(self, requirements=requirements)

    def __str__(self) -> str:
        parts = [f"a context of {self.num_tokens} tokens", *sorted(self.features)]
        parts += ["deterministic"] if self.is_deterministic else []
        return ", ".join([*parts, *map(str, self.requirements)])


def parse_requirements(text: str) -> tuple[tuple[Requirement, ...], bool]:
    """The terms of the header, and whether it asks for determinism. Raises `RequestError`."""
    requirements: list[Requirement] = []
    is_deterministic = False
    terms = [term.strip() for term in text.split(",")]
    if len(terms) > MAX_TERMS:
        raise _wrong(f"has {len(terms)} terms; at most {MAX_TERMS} are allowed")
    for term in filter(None, terms):
        if term == "deterministic":
            is_deterministic = True
        else:
            requirements.append(_parse_term(term))
    return tuple(requirements), is_deterministic


def _parse_term(term: str) -> Requirement:
    left, separator, right = term.partition("=")
    key = left.removesuffix("!").strip()
    values = tuple(value.strip() for value in right.split("|"))
    if not separator or not _is_key(key):
        raise _wrong(f"has the term {term[:80]!a}; terms are key=value, with the keys {KNOWN}")
    if not all(NAME.fullmatch(value) for value in values):
        raise _wrong(f"has the term {term[:80]!a}; values are names, joined by |")
    return Requirement(key, values, is_not=left.endswith("!"))


def _is_key(key: str) -> bool:
    mode, _, part = key.rpartition(".")
    if part in PATH_KEYS:
        return mode in ("", *MODES)
    prefix, _, name = key.partition(".")
    if prefix == "label":
        return NAME.fullmatch(name) is not None
    return key in PLAN_KEYS or key in OWN_KEYS


def _wrong(what: str) -> RequestError:
    return RequestError(f"{HEADER} {what}", HEADER)


def no_capable_worker(
    needs: Needs, workers: Sequence[Worker], asleep: Sequence[str] = ()
) -> RequestError:
    """The 400 that names what is missing, what each worker lacks, and what is said of pools that
    have none (`asleep`).
    """
    lacks = [f"{worker.id}: {'; '.join(needs.why_not(worker))}" for worker in workers[:8]]
    if len(workers) > len(lacks):
        lacks.append(f"and {len(workers) - len(lacks)} more")
    lacks += asleep
    by_header = bool(needs.requirements) or needs.is_deterministic
    return RequestError(
        f"no worker of this model can serve the request, which needs {needs}. " + ". ".join(lacks),
        HEADER if by_header else None,
        "no_capable_worker",
    )
