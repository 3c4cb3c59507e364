"""Conversions between element types that are the same on a device and in Triton's interpreter.

The interpreter (3.8) cuts float32 off to bfloat16 and does not convert between the 16-bit types at all.
"""

import triton
import triton.language as tl


@triton.jit
def to_bfloat16(x):
    """float32 to the nearest bfloat16, half to even."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def convert(x, TYPE: tl.constexpr):
    """To another element type, to the nearest value that it has."""
    if x.dtype == TYPE:
        return x
    elif tl.bfloat16 == TYPE:
        return to_bfloat16(x.to(tl.float32))
    else:
        return x.to(tl.float32).to(TYPE)
