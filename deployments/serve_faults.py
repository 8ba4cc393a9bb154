"""Sentences for what a serve.yaml says wrong: which line, which key, and the nearest known one."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..runtime.errors import ConfigurationError
from .auth_config import HOW_TO
from .serve_file import Document, Loc, spell
from .serve_schema import ServeEntry

MAX_SENTENCES = 8
PLAINLY = {  # what pydantic says in words of Python
    "too_short": "is empty; it needs at least one item",
    "model_type": "must hold keys, such as key: value",
    "dict_type": "must hold keys, such as key: value",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}
HINTS: dict[tuple[str | int, ...], str] = {  # what a key wants, where its type says too little
    ("kv_bytes",): "bytes, or a size such as 512MB or 1GiB",
    ("hash",): f"a SHA-256 in hex, 64 of 0-9a-f; {HOW_TO}",
}
Fault = tuple[Loc, str]  # where, and what is wrong there


def faults_of(document: Document, error: ValidationError) -> list[Fault]:
    """A sentence for each of pydantic's errors; a missing key that was only misspelt is one."""
    details = error.errors()
    faults = [fault_of(document, detail) for detail in details]
    unknown = [text for (_, text), d in zip(faults, details, strict=True) if _is_unknown(d)]
    return [
        fault
        for fault, detail in zip(faults, details, strict=True)
        if detail["type"] != "missing"
        or not any(f"did you mean {detail['loc'][-1]}?" in text for text in unknown)
    ]


def _is_unknown(detail: ErrorDetails) -> bool:
    return detail["type"] == "extra_forbidden"


def refused(document: Document, faults: Sequence[Fault]) -> ConfigurationError:
    """All faults in one error, a line each."""
    sentences = [f"{document.place(loc)}: {sentence}" for loc, sentence in faults]
    more = len(sentences) - MAX_SENTENCES
    shown = sentences[:MAX_SENTENCES] + ([f"and {more} more"] if more > 0 else [])
    return ConfigurationError("\n".join(shown))


def fault_of(document: Document, detail: ErrorDetails) -> Fault:
    """One sentence for one of pydantic's errors."""
    loc = _without_tags(document.data, detail["loc"])
    if detail["type"] == "extra_forbidden":
        return loc, _unknown_key(loc)
    if detail["type"] == "missing":
        field = _entry_at(loc[:-1]).model_fields[str(loc[-1])]
        return loc, f"{spell(loc)} is missing: {field.description}"
    if detail["type"] in PLAINLY:
        return loc, f"{spell(loc)} {PLAINLY[detail['type']]}"
    if loc[-1:] in HINTS:
        return loc, f"{spell(loc)} is {detail['input']!r}; it must be {HINTS[loc[-1:]]}"
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if isinstance(detail["input"], str | int | float | None):
        quote = " (quote it: YAML reads it so)" if "valid string" in message else ""
        return loc, f"{spell(loc)} is {detail['input']!r}; {message}{quote}"
    return loc, f"{spell(loc)}: {message}"


def _without_tags(data: object, loc: Sequence[str | int]) -> Loc:
    """pydantic's location without the names it gives to the branches of a union."""
    kept: list[str | int] = []
    for part in loc:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif isinstance(data, dict):
            data = data.get(part)
        else:
            continue
        kept.append(part)
    return tuple(kept)


def _unknown_key(loc: Loc) -> str:
    entry, key = _entry_at(loc[:-1]), str(loc[-1])
    known = list(entry.model_fields)
    where = "of the file" if len(loc) == 1 else f"of {spell(loc[:-1])}"
    near = difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"keys there are {', '.join(known)}"
    return f"{key[:60]} is no key {where}; {hint}"


def _entry_at(loc: Loc) -> type[BaseModel]:
    """The class that describes the mapping at `loc`."""
    entry: type[BaseModel] = ServeEntry
    for part in loc:
        if isinstance(part, str):
            entry = next(_entries(entry.model_fields[part].annotation), entry)
    return entry


def _entries(annotation: Any) -> Iterator[type[BaseModel]]:  # Any: an annotation has no type
    """Classes of this file's mappings inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _entries(inner)
