"""The options of an engine, written once: a command that takes an EngineConfig gets them all."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ...runtime.attention import registry as attention
from ...runtime.config import EngineConfig
from ...runtime.errors import ConfigurationError
from ...runtime.linear import registry as linear
from ...runtime.ops import registry as ops
from ...runtime.planning.candidate import Candidate
from ...runtime.runners import registry as runners

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes from "1500000", "512MB" (10**6) or "1GiB" (2**30); BadParameter for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", str(text).strip().upper())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 1500000, 512MB or 1GiB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """A typer command of `command(config: EngineConfig, ...)`: MODEL, its own options, then ours.

    A wrong option ends with one line on stderr and exit code 2.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    assert own and own[0].name == "config", f"{command.__name__} takes config first"
    parameters = [_MODEL, *(p.replace(kind=_KEYWORD) for p in own[1:]), *_options()]

    @functools.wraps(command)
    def run(**values: Any) -> None:  # Any: what typer parsed
        rest = {p.name: values.pop(p.name) for p in own[1:]}
        command(_config(values), **rest)

    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _config(values: dict[str, Any]) -> EngineConfig:  # Any: what typer parsed
    values["prefix_cache"] = not values.pop("no_prefix_cache")
    values["self_check"] = not values.pop("no_self_check")
    values["calibration"] = not values.pop("no_calibration")
    try:
        return EngineConfig(**values)
    except ConfigurationError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_MODEL = inspect.Parameter(
    "model",
    _KEYWORD,
    default="",
    annotation=Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder, .gguf file or hub id; SmolLM2-135M-Instruct if not given.",
            show_default=False,
        ),
    ],
)


def _options() -> list[inspect.Parameter]:
    return [*_choices(), *_sizes(), *_switches()]


def _choices() -> list[inspect.Parameter]:
    return [
        _auto("device", "Where it runs: cpu or cuda."),
        _auto("dtype", "Of weights and activations: float32, bfloat16 or float16."),
        _auto("kv_dtype", "Of keys and values; that of activations if auto."),
        _auto("runner", "How a pass is launched: " + _names(runners.CANDIDATES)),
        _auto("attention_backend", "Who computes attention: " + _names(attention.CANDIDATES)),
        _auto("ops", "Who computes the other operations: " + _names(ops.CANDIDATES)),
        _auto("linear_method", "How weights are stored: " + _names(linear.CANDIDATES)),
        _auto("quantization", "At most so many bits a weight: int8, int4; as stored if auto."),
    ]


def _sizes() -> list[inspect.Parameter]:
    return [
        _number("num_threads", "CPU threads of a step; all cores that may be used if not given."),
        _number("overlap_depth", "Steps launched while one runs: 0, or 1 as by default on a GPU."),
        _number("page_size", "Tokens a KV page; a power of two."),
        _option("kv_bytes", Annotated[int | None, _kv_bytes()], None),
        _option(
            "memory_share",
            Annotated[
                float | None,
                typer.Option(help="Share of the memory left after weights that the KV pool takes."),
            ],
            None,
        ),
        _number("max_model_len", "Longest prompt and answer together, in tokens."),
        _number("max_num_seqs", "Requests that run at once."),
        _number("max_num_batched_tokens", "Tokens of one step."),
        _number("max_waiting", "Requests that may queue in a worker; more get 429."),
    ]


def _switches() -> list[inspect.Parameter]:
    return [
        _text("served_model_name", "Name that clients ask for; the model's own if not given."),
        _text("chat_template", "A jinja file, or the template itself."),
        _text("flash_attn_library", "File of vLLM's FA3 extension, used without vLLM."),
        _switch("no_prefix_cache", "Do not share pages of equal prompt beginnings."),
        _switch("no_self_check", "Do not compare the planned paths with the yardstick at start."),
        _switch("no_calibration", "Do not measure this node's speed at start; requests will tell."),
    ]


def _names(candidates: tuple[Candidate, ...]) -> str:
    return ", ".join(candidate.name for candidate in candidates) + "."


def _kv_bytes() -> Any:  # Any: typer's OptionInfo, which typer does not export
    return typer.Option(
        parser=parse_bytes, metavar="SIZE", help="Size of the KV pool: 512MB, 1GiB or bytes."
    )


def _auto(name: str, text: str) -> inspect.Parameter:
    return _option(name, Annotated[str, typer.Option(help=text)], "auto")


def _number(name: str, text: str) -> inspect.Parameter:
    return _option(name, Annotated[int | None, typer.Option(help=text)], None)


def _text(name: str, text: str) -> inspect.Parameter:
    return _option(name, Annotated[str | None, typer.Option(help=text)], None)


def _switch(name: str, text: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    return _option(name, Annotated[bool, typer.Option(flag, help=text)], False)


def _option(name: str, annotation: Any, default: object) -> inspect.Parameter:
    """A keyword of the command (Any: an Annotated form, which has no type of its own)."""
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)
