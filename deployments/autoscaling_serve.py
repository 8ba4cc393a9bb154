"""The scaling policy that Ray Serve is given by name (`POLICY`). Serve copies this module by value
into its controller, so it holds nothing but the way to the one that is imported there.
"""

from __future__ import annotations

from typing import Any

POLICY = "polypath.deployments.autoscaling_serve:scale_pools"


def scale_pools(
    contexts: dict[Any, Any],  # DeploymentID -> AutoscalingContext
) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Workers of every pool of the application, by what its gateways report."""
    from .autoscaling_controller import answer

    return answer(contexts)
