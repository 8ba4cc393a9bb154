"""Float weights as the checkpoint stores them (2 bytes stay 2), multiplied by our native CPU
kernel.
"""

from __future__ import annotations

from ..build_context import BuildContext
from ..planning.capability import Capability
from .native import NativeMethod

CAPABILITY = Capability(
    name="dense_native",
    kind="linear",
    source="runtime/linear/dense_native.py",
    devices=("cpu",),
    dtypes=("float32",),
    batch_invariant=True,
    native_kernels=True,
    keeps_stored=("float32", "bfloat16", "float16"),
)


def build(context: BuildContext) -> NativeMethod:
    """The method over the plan's build of the kernels; activations are float32 and not rounded."""
    return NativeMethod("dense_native", context.native, keeps_blocks=False)
