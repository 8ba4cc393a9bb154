"""Who may use the server and how much: API keys by their hashes, from a config or the environment.

A raw key stands nowhere: not here, not in an error about a wrong entry, not in the cluster's state.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..runtime.errors import ConfigurationError

HASH = re.compile(r"[0-9a-f]{64}")
HOW_TO = "make a key and its hash with `polypath key`"
INFERENCE_VARIABLE = "POLYPATH_API_KEYS"  # hashes with commas between them
ADMIN_VARIABLE = "POLYPATH_ADMIN_KEYS"
LEFT_OUT = "(left out)"


class Role(StrEnum):
    """What a key may do. An admin key may do all that an inference key may."""

    INFERENCE = "inference"
    ADMIN = "admin"


class KeyConfig(BaseModel):
    """One API key: a name for people and logs, the SHA-256 of the key, and its limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9._\-]{1,64}$", description="What people call it; no secret."
    )
    hash: str = Field(pattern=f"^{HASH.pattern}$", description="SHA-256 of the key, in hex")
    role: Role = Field(default=Role.INFERENCE, description="inference, or admin for all.")
    models: tuple[str, ...] | None = Field(
        default=None, description="Names of models it may use; all if not given."
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, strict=True, description="Requests of any 60 s."
    )
    tokens_per_minute: int | None = Field(
        default=None, ge=1, strict=True, description="Prompt and generated tokens of any 60 s."
    )
    max_concurrent: int | None = Field(
        default=None, ge=1, strict=True, description="Requests at once."
    )
    priority: int = Field(
        default=0,
        ge=-(2**31),
        lt=2**31,
        strict=True,
        description="Of requests that name none, and the most urgent (smallest) they may name.",
    )

    @model_validator(mode="before")
    @classmethod
    def _hide(cls, data: Any) -> Any:  # whatever the config holds
        """What may be a raw key by mistake must not reach an error's text, which quotes input."""
        if isinstance(data, KeyConfig):
            return data
        if not isinstance(data, dict):
            return {}
        hidden = {
            key: value if key in cls.model_fields else LEFT_OUT for key, value in data.items()
        }
        found = hidden.get("hash")
        if found is not None and not (isinstance(found, str) and HASH.fullmatch(found)):
            hidden["hash"] = LEFT_OUT
        return hidden

    @property
    def has_limits(self) -> bool:
        """Whether anything about this key has to be counted."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in limits)


class AuthConfig(BaseModel):
    """The section `auth`: no keys at all means that the server is open."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeyConfig, ...] = Field(default=(), description="API keys, by their hashes.")

    @model_validator(mode="before")
    @classmethod
    def _hide(cls, data: Any) -> Any:  # whatever the config holds
        """As for a key: nothing that may be one is quoted."""
        if isinstance(data, AuthConfig):
            return data
        if not isinstance(data, dict):
            return {LEFT_OUT: None}
        keys = data.get("keys", ())
        hidden = dict.fromkeys(data, LEFT_OUT)
        return hidden | {"keys": keys if isinstance(keys, list | tuple) else LEFT_OUT}

    @model_validator(mode="after")
    def _distinct(self) -> AuthConfig:
        for field in ("name", "hash"):
            values = [getattr(key, field) for key in self.keys]
            twice = [key.name for key in self.keys if values.count(getattr(key, field)) > 1]
            if twice:
                raise ValueError(f"two keys have one {field}: {', '.join(sorted(set(twice)))}")
        return self

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the port may use the server."""
        return not self.keys

    @property
    def has_limits(self) -> bool:
        """Whether any key's use is counted."""
        return any(key.has_limits for key in self.keys)


def with_environment(auth: AuthConfig, environ: Mapping[str, str] = os.environ) -> AuthConfig:
    """`auth` with the keys of the environment beside its own. Raises ConfigurationError."""
    more = keys_from_environment(environ)
    if not more:
        return auth
    try:
        return AuthConfig(keys=(*auth.keys, *more))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigurationError(f"keys of the config and the environment: {reason}") from None


def keys_from_environment(environ: Mapping[str, str]) -> tuple[KeyConfig, ...]:
    """The keys whose hashes stand in POLYPATH_API_KEYS and POLYPATH_ADMIN_KEYS, without limits.

    Raises ConfigurationError, which does not quote what was found: it may be a raw key.
    """
    keys: list[KeyConfig] = []
    for variable, role in ((INFERENCE_VARIABLE, Role.INFERENCE), (ADMIN_VARIABLE, Role.ADMIN)):
        entries = [entry.strip() for entry in environ.get(variable, "").split(",")]
        for number, entry in enumerate(filter(None, entries), 1):
            if not HASH.fullmatch(entry):
                raise ConfigurationError(
                    f"entry {number} of {variable} has {len(entry)} characters and is no SHA-256 "
                    f"in hex (64 of 0-9a-f); {HOW_TO}"
                )
            keys.append(KeyConfig(name=f"{role.value}-{number}", hash=entry, role=role))
    return tuple(keys)
