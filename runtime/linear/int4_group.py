"""4-bit weights in groups of 32, multiplied by our native CPU kernel."""

from __future__ import annotations

from ..build_context import BuildContext
from ..planning.capability import Capability
from .native import NativeMethod

CAPABILITY = Capability(
    name="int4_group",
    kind="linear",
    source="runtime/linear/int4_group.py",
    devices=("cpu",),
    dtypes=("float32",),
    batch_invariant=True,
    native_kernels=True,
    keeps_stored=("Q4_0", "Q4_1"),
    repacks=("Q4_K",),
    quantizes=("int4",),
)


def build(context: BuildContext) -> NativeMethod:
    """The method over the plan's build of the kernels."""
    return NativeMethod("int4_group", context.native, context.quantization)
