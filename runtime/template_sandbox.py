"""A jinja2 sandbox for chat templates: transformers' extras, and limits on time and size.

Templates come with models and are foreign code. Every turn of a loop and every macro call looks at
the clock, every piece of
output at the size, and products that would be huge are refused before they are made. Single
operations in C are not
interrupted; the sandbox bounds what they work on (ranges of 100,000, texts of `MAX_CHARS`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 1 << 24  # of a rendered chat, and of any text on the way there
MAX_BITS = 1 << 14  # of a whole number; Python prints no longer ones either
TIME_LIMIT_S = 2.0
_TICK = "polypath_tick"
_JOIN = "polypath_join"

# What foreign template code may raise; jinja2 lets Python's own errors through.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class LimitError(jinja2.TemplateError):
    """A template took too long or grew too large."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks what the assistant says for training; here it only renders its
    body.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        """The body in place of the tag (jinja2's parser has no public type)."""
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        return body


class SafeNamespace(Namespace):
    """`namespace()` without underscore names, which could reach interpreter internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants would be computed while compiling, outside all limits
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters |= {
            "tojson": _to_json,
            "center": _limited_filter(self.filters["center"]),
            "indent": _limited_filter(self.filters["indent"]),
            "format": _limited_filter(self.filters["format"]),
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": dict,
            "namespace": SafeNamespace,
            _JOIN: _join,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _limited(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses products, powers and sums that would be huge."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(sized, str | list | tuple):
                    _check_size(len(sized) * count)
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses paddings to a huge width."""
        if getattr(__obj, "__name__", "") in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            for width in (*args, *kwargs.values()):
                _check_size(width if isinstance(width, int) else 0)
        return super().call(__context, __obj, *args, **kwargs)


class CompiledTemplate:
    """One template, compiled. Raises jinja2.TemplateSyntaxError when it does not compile."""

    def __init__(self, text: str) -> None:
        self._template = ChatEnvironment().from_string(text)

    def render(self, variables: Mapping[str, Any], time_limit_s: float = TIME_LIMIT_S) -> str:
        """The text. Raises one of TEMPLATE_ERRORS."""
        end = time.monotonic() + time_limit_s

        def tick() -> str:
            if time.monotonic() > end:
                raise LimitError(f"it was still rendering after {time_limit_s:g} s")
            return ""

        return _collect(self._template.generate({**variables, _TICK: tick}), tick)


def _collect(chunks: Iterable[str], tick: Callable[[], str]) -> str:
    parts, num_chars = [], 0
    for chunk in chunks:
        tick()
        num_chars += len(chunk)
        _check_size(num_chars)
        parts.append(chunk)
    return "".join(parts)


def _limited(template: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """A look at the clock at the head of every loop and macro, and a size check for `~`."""
    for kind in (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock):
        for node in template.find_all(kind):
            name = jinja2.nodes.Name(_TICK, "load", lineno=node.lineno)
            call = jinja2.nodes.Call(name, [], [], None, None, lineno=node.lineno)
            node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
    _replace_concat(template)
    return template


def _replace_concat(node: jinja2.nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_without_concat(each) for each in value])
        else:
            setattr(node, field, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if not isinstance(value, jinja2.nodes.Node):
        return value
    _replace_concat(value)
    if not isinstance(value, jinja2.nodes.Concat):
        return value
    name = jinja2.nodes.Name(_JOIN, "load", lineno=value.lineno)
    return jinja2.nodes.Call(name, value.nodes, [], None, None, lineno=value.lineno)


def _join(*values: Any) -> str:
    """jinja2's `~`."""
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _limited_filter(filter: Callable[..., str]) -> Callable[..., str]:
    """A filter of jinja2's that refuses huge widths."""

    def limited(text: Any, *args: Any, **kwargs: Any) -> str:
        _check_widths(str(text))
        for width in (*args, *kwargs.values()):
            _check_size(width if isinstance(width, int) else 0)
        return filter(text, *args, **kwargs)

    return limited


def _check_widths(format: str) -> None:
    """Widths written into a format, as in `%9999999d`."""
    for digits in re.findall(r"%[^a-zA-Z%]{0,9}?(\d{6,})", format):
        _check_size(int(digits[:18]))


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise LimitError(f"it makes a text of {num_chars} characters; the limit is {MAX_CHARS}")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise LimitError(f"it makes a number of {num_bits} bits; the limit is {MAX_BITS}")


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is private")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: jinja2's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
