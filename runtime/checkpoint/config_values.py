"""Typed reading of a configuration dictionary, so that a wrong value is one sentence and never a
type error later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """A JSON object or GGUF metadata under the name of its file; null counts as absent."""

    values: Mapping[str, Any]  # as parsed from JSON or GGUF
    file: str

    def get(self, key: str) -> Any:  # any JSON value
        """The raw value, or None."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; without a default the key is required."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.file} has no {key}, which says the model's shape.")
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != int_or_none(value)
        ):
            raise ModelError(f"{self.file}: {key} is {value!r}; it must be a whole number.")
        if value < minimum:
            raise ModelError(f"{self.file}: {key} is {value!r}; it must be at least {minimum}.")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; without a default the key is required."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.file} has no {key}, which is needed.")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.file}: {key} is {value!r}; it must be a number.")
        if not math.isfinite(value) or value <= 0:
            raise ModelError(f"{self.file}: {key} is {value!r}; it must be finite and above 0.")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.file}: {key} is {value!r}; it must be true or false.")
        return value

    def section(self, key: str) -> ConfigValues | None:
        """A nested object; None when absent, null or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.file}: {key} is {value!r}; it must be an object.")
        return ConfigValues(value, f"{self.file}: {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids spelled as null, one number or a list."""
        value = self.values.get(key)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelError(f"{self.file}: {key} is {value!r}; token ids are whole numbers.")
        return ids


def int_or_none(value: float) -> int | None:
    """The whole number that a number is equal to, None for infinities and NaN."""
    return int(value) if math.isfinite(value) else None
