"""8-bit weights in groups of 32, multiplied by our native CPU kernel."""

from __future__ import annotations

from ..build_context import BuildContext
from ..planning.capability import Capability
from .native import NativeMethod

CAPABILITY = Capability(
    name="int8",
    kind="linear",
    source="runtime/linear/int8.py",
    devices=("cpu",),
    dtypes=("float32",),
    batch_invariant=True,
    native_kernels=True,
    keeps_stored=("Q8_0", "Q5_0"),
    repacks=("Q6_K", "Q5_K", "Q5_1"),
    quantizes=("int8",),
)


def build(context: BuildContext) -> NativeMethod:
    """The method over the plan's build of the kernels."""
    return NativeMethod("int8", context.native, context.quantization)
