"""Reads a YAML file so that each value knows its line; a key given twice is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..runtime.errors import ConfigurationError

Loc = tuple[str | int, ...]
MAX_BYTES = 1 << 20
MAX_VALUES = 20_000  # aliases can make many out of few


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A file's content, and the line of each key and item. `name` is how messages call the file."""

    name: str
    data: Any  # plain YAML values
    lines: dict[Loc, int] = field(default_factory=dict)

    def place(self, loc: Loc) -> str:
        """Such as "serve.yaml, line 12": the line of `loc`, or of the nearest part around it."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        line = self.lines.get(loc)
        return f"{self.name}, line {line}" if line else self.name


def read_document(path: Path) -> Document:
    """Raises ConfigurationError for a file that cannot be read or is no YAML."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigurationError(f"{path} is larger than {MAX_BYTES} bytes; that is no config")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is no UTF-8 text: {error.reason}") from None
    return parse_document(text, path.name)


def parse_document(text: str, name: str) -> Document:
    """Raises ConfigurationError with the line of what is no YAML, or of a key given twice."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigurationError(f"{name} is empty; it needs at least the key models")
        lines: dict[Loc, int] = {}
        _walk(root, (), name, lines, set())
        return Document(name=name, data=loader.construct_document(root), lines=lines)
    except ConfigurationError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{name}{line}: no YAML: {error.problem}") from None
    except RecursionError:
        raise ConfigurationError(f"{name} nests too deeply; that is no config") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{name}: no YAML: {error}") from None
    finally:
        loader.dispose()


def _walk(node: yaml.Node, loc: Loc, name: str, lines: dict[Loc, int], above: set[int]) -> None:
    """Note lines; `above` holds the nodes around this one, since an alias may point to them."""
    lines.setdefault(loc, node.start_mark.line + 1)
    if id(node) in above:
        raise ConfigurationError(f"{name}, line {lines[loc]}: an alias that contains itself")
    if len(lines) > MAX_VALUES:
        raise ConfigurationError(f"{name} has more than {MAX_VALUES} values; that is no config")
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _walk(item, (*loc, number), name, lines, above)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*loc, str(key.value))
            line = key.start_mark.line + 1
            if inner in lines:
                raise ConfigurationError(
                    f"{name}, line {line}: {spell(inner)} was given in line {lines[inner]} already"
                )
            lines[inner] = line
            _walk(value, inner, name, lines, above)


def spell(loc: Loc) -> str:
    """A place in the data as people write it: `models[0].pools[1].num_cpus`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".") or "the file"
