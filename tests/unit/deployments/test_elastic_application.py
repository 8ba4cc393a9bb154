"""The application of pools that are scaled: what Serve is told of each deployment, and that it is
the same once it went through Serve's declarative form. No Ray runs here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from polypath.deployments.fleet import FleetSpec, ModelSpec, PoolSpec
from polypath.deployments.front import FrontAddress
from polypath.runtime.config import EngineConfig

pytest.importorskip("ray.serve")
# Serve means to replace it by variables of the environment, which every node would have to have.
pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field")
FRONT = FrontAddress(host="127.0.0.1", port=8000, node_id="n")


def fleet(*pools: dict[str, Any]) -> FleetSpec:
    engine = EngineConfig(model="/m", served_model_name="m")
    specs = [
        PoolSpec(name=f"p{n}", engine=engine, num_cpus=1.0, **pool) for n, pool in enumerate(pools)
    ]
    model = ModelSpec(model="/m", name="m", engine=engine, pools=tuple(specs))
    return FleetSpec(models=(model,))


def deployments(fleet: FleetSpec, front: FrontAddress | None = FRONT) -> dict[str, Any]:
    """Serve's configuration of each deployment, after a journey through the declarative form."""
    from ray.serve._private.build_app import build_app

    from polypath.deployments.app import build_application, packed, unpacked

    if front is None:
        application = build_application(fleet)
    else:
        application = unpacked(json.loads(json.dumps(packed(fleet, "start-1", front))))
    built = build_app(application, name="polypath")
    return {each.name: each._deployment_config for each in built.deployments}


def test_pools_that_are_scaled_obey_at_once_and_the_gateway_is_seen() -> None:
    found = deployments(
        fleet({"num_workers": 0, "max_workers": 3}, {"num_workers": 2, "max_surge_percent": 50})
    )
    scaled, fixed, gateway = found["m.p0"], found["m.p1"], found["gateway"]
    config = scaled.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.initial_replicas) == (0, 3, None)
    assert config.upscale_delay_s == config.downscale_delay_s == 0
    assert config.downscale_to_zero_delay_s == 0
    assert (fixed.autoscaling_config, fixed.num_replicas) == (None, 2)
    assert (scaled.max_surge_percent, fixed.max_surge_percent) == (0, 50)
    assert gateway.autoscaling_config.max_replicas == 1
    assert scaled.max_constructor_retry_count == 3 and fixed.max_constructor_retry_count == 1


def test_pools_of_a_fixed_size_need_no_policy() -> None:
    found = deployments(fleet({"num_workers": 1}))
    assert all(each.autoscaling_config is None for each in found.values())


def test_a_gateway_behind_serves_proxy_is_replaced_by_one_beside_it() -> None:
    behind = deployments(fleet({"num_workers": 1}), front=None)["gateway"]
    at_front = deployments(fleet({"num_workers": 1}))["gateway"]
    assert (behind.max_surge_percent, at_front.max_surge_percent) == (100, 0)
    assert behind.graceful_shutdown_timeout_s > at_front.graceful_shutdown_timeout_s


def test_serve_reads_the_policy_by_its_name() -> None:
    from ray.serve.config import AutoscalingPolicy

    from polypath.deployments.autoscaling_serve import POLICY, scale_pools

    policy = AutoscalingPolicy(policy_function=POLICY)
    policy.serialize_policy()
    assert policy.get_policy().__name__ == scale_pools.__name__
    assert policy.get_policy()({}) == ({}, {})
