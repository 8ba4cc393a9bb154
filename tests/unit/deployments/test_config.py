"""Which Ray is used is the user's word alone."""

from __future__ import annotations

import pytest

from polypath.deployments.config import ServeConfig, cluster_address
from polypath.runtime.errors import ConfigurationError


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (None, {}, (None, "default")),
        ("10.0.0.1:6379", {}, ("10.0.0.1:6379", "--address")),
        (None, {"RAY_ADDRESS": "10.0.0.2:6379"}, ("10.0.0.2:6379", "RAY_ADDRESS")),
        ("auto", {"RAY_ADDRESS": "10.0.0.2:6379"}, ("auto", "--address")),
        ("local", {"RAY_ADDRESS": "10.0.0.2:6379"}, (None, "--address")),
        (None, {"RAY_ADDRESS": "local"}, (None, "RAY_ADDRESS")),
        (None, {"RAY_ADDRESS": ""}, (None, "default")),
    ],
)
def test_only_a_named_cluster_is_joined(
    option: str | None, environ: dict[str, str], expected: tuple[str | None, str]
) -> None:
    assert cluster_address(option, None, environ) == expected


def test_a_files_address_stands_between_the_option_and_the_variable() -> None:
    environ = {"RAY_ADDRESS": "10.0.0.2:6379"}
    assert cluster_address(None, "10.0.0.3:6379", environ) == ("10.0.0.3:6379", "address")
    assert cluster_address("auto", "10.0.0.3:6379", environ) == ("auto", "--address")
    assert cluster_address(None, "local", environ) == (None, "address")


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_port_out_of_range_is_refused_with_the_range(port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{port}; it must be between 1 and 65535"):
        ServeConfig(port=port)


def test_an_empty_host_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--host is empty"):
        ServeConfig(host="")
