"""Rotary settings of a config.json: every spelling of the same thing becomes one `RopeConfig`, or a
refusal by name.

Spellings: `rope_theta`; `rope_scaling` with `type` or `rope_type`; `rope_parameters`, flat or one
object a layer type.
Rules follow transformers 5.24 (modeling_rope_utils.py), except that it warns where we refuse.
"""

from __future__ import annotations

from typing import Any

from ..config import RopeConfig
from ..errors import ModelError
from .config_values import ConfigValues

SUPPORTED = "default, linear and llama3"
DEFAULT_THETA = 10_000.0


def read_rope(
    config: ConfigValues, max_position: int, layer_types: tuple[str, ...] = ()
) -> RopeConfig:
    """The rotary settings of a config.json.

    `layer_types` are those the model has, for nested `rope_parameters`.
    """
    sections = [
        _flat(section, layer_types)
        for key in ("rope_scaling", "rope_parameters")
        if (section := config.section(key)) is not None
    ]
    theta = config.number("rope_theta", DEFAULT_THETA)
    readings = [_read_section(section, config, theta, max_position) for section in sections]
    if len(readings) == 2 and readings[0] != readings[1]:
        raise ModelError(
            f"{config.file}: rope_scaling ({_say(sections[0])}) and rope_parameters"
            f" ({_say(sections[1])}) contradict"
            " each other; remove the wrong one."
        )
    _refuse_partial(config)
    return readings[0] if readings else RopeConfig(theta=theta)


def scaling_fact(rope: RopeConfig, max_position: int) -> list[str]:
    """Whether scaling widened the context, in one line; nothing when there is no scaling."""
    if rope.scaling == "none":
        return []
    return [
        f"positions: {rope.scaling} scaling by {rope.factor:g}; the context of {max_position}"
        " tokens is the model's own number as it stands, scaling does not widen it"
    ]


def _flat(section: ConfigValues, layer_types: tuple[str, ...]) -> ConfigValues:
    """One object for all layers.

    What is nested under layer types must be the same for all that the model uses.
    """
    nested = [key for key, value in section.values.items() if isinstance(value, dict)]
    if not nested:
        return section
    unknown = [key for key in nested if key not in layer_types]
    if unknown or len(nested) != len(section.values):
        raise ModelError(
            f"{section.file} has an object {(unknown or nested)[0]!r}, but the layer types of this"
            " model are"
            f" {', '.join(sorted(set(layer_types))) or 'not named'}."
        )
    objects = [section.values[key] for key in nested]
    if any(each != objects[0] for each in objects[1:]):
        raise ModelError(
            f"{section.file} differs between layer types ({', '.join(nested)}); one rotary setting"
            " for all layers is"
            " supported."
        )
    return ConfigValues(objects[0], section.file)


def _read_section(
    section: ConfigValues, config: ConfigValues, theta: float, max_position: int
) -> RopeConfig:
    own_theta = section.number("rope_theta", theta)
    if config.get("rope_theta") is not None and own_theta != theta:
        raise ModelError(
            f"{config.file}: rope_theta is {theta:g}, but {own_theta:g} in {section.file}; remove"
            " the wrong one."
        )
    _refuse_partial(section)
    kind = _kind(section)
    if kind == "default":
        return RopeConfig(theta=own_theta)
    if kind == "linear":
        return RopeConfig(theta=own_theta, scaling="linear", factor=_factor(section))
    if kind == "llama3":
        return _llama3(section, config, own_theta, max_position)
    raise ModelError(f"{section.file}: rotary scaling {kind!r} is not supported; {SUPPORTED} are.")


def _kind(section: ConfigValues) -> str:
    old, new = section.get("type"), section.get("rope_type")
    if old is not None and new is not None and old != new:
        raise ModelError(
            f"{section.file}: type is {old!r} and rope_type is {new!r}; remove the wrong one."
        )
    if section.get("mrope_section") is not None:
        return "mrope"
    kind = new if new is not None else old
    if kind is None:
        if section.get("factor") is not None:
            raise ModelError(
                f"{section.file} has a factor but no rope_type; {SUPPORTED} are supported."
            )
        return "default"
    return str(kind)


def _llama3(
    section: ConfigValues, config: ConfigValues, theta: float, max_position: int
) -> RopeConfig:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise ModelError(
            f"{section.file}: high_freq_factor is {high:g}; it must be above low_freq_factor,"
            f" {low:g}."
        )
    # As transformers: a number beside the section wins, and without any the context length stands
    # in.
    outer = config.integer("original_max_position_embeddings", max_position)
    inner = section.integer("original_max_position_embeddings", outer)
    if config.get("original_max_position_embeddings") is not None and inner != outer:
        raise ModelError(
            f"{config.file}: original_max_position_embeddings is {outer}, but {inner} in"
            f" {section.file};"
            " remove the wrong one."
        )
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=_factor(section),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=inner,
    )


def _factor(section: ConfigValues) -> float:
    factor = section.number("factor")
    if factor < 1.0:
        raise ModelError(f"{section.file}: factor is {factor:g}; it must be at least 1.")
    return factor


def _refuse_partial(section: ConfigValues) -> None:
    share = section.get("partial_rotary_factor")
    if share is not None and share != 1.0:
        raise ModelError(
            f"{section.file}: partial_rotary_factor is {share!r}; only models that rotate whole"
            " heads (1.0) are"
            " supported."
        )


def _say(section: ConfigValues) -> str:
    shown: dict[str, Any] = dict(section.values)  # JSON values
    return ", ".join(f"{key} {value}" for key, value in shown.items())
