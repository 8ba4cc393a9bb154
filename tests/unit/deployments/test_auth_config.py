"""Keys as configured: hashes only, and never a raw key in an error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from polypath.deployments.auth_config import (
    AuthConfig,
    KeyConfig,
    Role,
    keys_from_environment,
    with_environment,
)
from polypath.deployments.keys import KeyRing, hash_key, new_key
from polypath.runtime.errors import ConfigurationError

RAW = "pp-MARKED-RAW-KEY"
GOOD = {"name": "team", "hash": hash_key("pp-team")}


class Outer(BaseModel):
    """As a config file has it."""

    auth: AuthConfig


@pytest.mark.parametrize(
    "key",
    [
        {"name": "team", "hash": RAW},
        {"name": "team", "key": RAW, "hash": GOOD["hash"]},
        {"name": "team", "hash": [RAW]},
        {"name": "team", "hash": GOOD["hash"].upper() + RAW},
    ],
)
def test_a_raw_key_by_mistake_is_refused_without_being_shown(key: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"auth": {"keys": [key]}})
    assert "MARKED" not in str(caught.value)
    assert "MARKED" not in str(caught.value.errors())


@pytest.mark.parametrize("auth", [RAW, [RAW], {"keys": RAW}, {"keys": [RAW]}, {"key": RAW}])
def test_a_raw_key_in_another_place_is_not_shown_either(auth: object) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"auth": auth})
    assert "MARKED" not in str(caught.value)
    assert "MARKED" not in str(caught.value.errors())


def test_keys_of_the_environment_stand_beside_those_of_the_config() -> None:
    auth = AuthConfig.model_validate({"keys": [GOOD]})
    both = with_environment(auth, {"POLYPATH_ADMIN_KEYS": hash_key("boss")})
    assert [key.name for key in both.keys] == ["team", "admin-1"]
    assert with_environment(auth, {}) is auth
    with pytest.raises(ConfigurationError, match="two keys have one hash: inference-1, team"):
        with_environment(auth, {"POLYPATH_API_KEYS": str(GOOD["hash"])})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "two words"},
        {"name": ""},
        {"role": "king"},
        {"requests_per_minute": 0},
        {"tokens_per_minute": -1},
        {"max_concurrent": 0},
        {"priority": 2**31},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KeyConfig.model_validate({**GOOD, **wrong})


@pytest.mark.parametrize("field", ["name", "hash"])
def test_two_keys_with_one_name_or_hash_are_refused(field: str) -> None:
    other = {"name": "other", "hash": hash_key("pp-other")}
    with pytest.raises(ValidationError, match=f"two keys have one {field}: "):
        AuthConfig.model_validate({"keys": [GOOD, {**other, field: GOOD[field]}]})


def test_the_environment_holds_hashes_with_commas_between_them() -> None:
    one, two, three = (hash_key(key) for key in ("1", "2", "3"))
    keys = keys_from_environment(
        {"POLYPATH_API_KEYS": f"{one}, {two},", "POLYPATH_ADMIN_KEYS": three}
    )
    assert [(key.name, key.hash, key.role) for key in keys] == [
        ("inference-1", one, Role.INFERENCE),
        ("inference-2", two, Role.INFERENCE),
        ("admin-1", three, Role.ADMIN),
    ]
    assert keys_from_environment({}) == ()


def test_a_raw_key_in_the_environment_is_refused_without_being_shown() -> None:
    with pytest.raises(
        ConfigurationError, match="entry 1 of POLYPATH_API_KEYS has 17 char"
    ) as error:
        keys_from_environment({"POLYPATH_API_KEYS": RAW})
    assert "MARKED" not in str(error.value)
    assert "polypath key" in str(error.value)


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 43 for key in keys)


def test_a_ring_finds_each_key_and_no_other() -> None:
    configs = [KeyConfig(name=name, hash=hash_key(name)) for name in ("a", "b", "c")]
    ring = KeyRing(configs)
    assert [ring.find(name) for name in ("a", "b", "c")] == configs
    assert [ring.find(name) for name in ("", "d", "aa", hash_key("a"), "\udcff")] == [None] * 5


def test_a_config_travels_to_the_gateways() -> None:
    auth = AuthConfig.model_validate({"keys": [GOOD]})
    assert pickle.loads(pickle.dumps(auth)) == auth
