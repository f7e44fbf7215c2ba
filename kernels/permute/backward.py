"""Permute backward: dqkv (B,T,3C) out of dq, dk, dv (B,NH,T,hs). Unpermute backward: dinp (B,NH,T,hs) out of dout (B,T,C).

version 1: a thread an element
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda
from kernels.op import Op
from kernels.permute.forward import PERMUTE_SHAPES, permute_forward, unpermute_forward

permute_backward = Op(
    reference=cpu_reference.permute_backward,
    inputs=lambda rng, B, T, NH, hs: {
        name: rng.standard_normal((B, NH, T, hs), dtype=np.float32) for name in ("dq", "dk", "dv")
    },
    outputs=lambda B, T, NH, hs: {"dqkv": (B, T, 3 * NH * hs)},
    bytes_moved=permute_forward.bytes_moved,
    **PERMUTE_SHAPES,
)

unpermute_backward = Op(
    reference=cpu_reference.unpermute_backward,
    inputs=lambda rng, B, T, NH, hs: {"dout": rng.standard_normal((B, T, NH * hs), dtype=np.float32)},
    outputs=lambda B, T, NH, hs: {"dinp": (B, NH, T, hs)},
    bytes_moved=unpermute_forward.bytes_moved,
    **PERMUTE_SHAPES,
)


@cuda.jit(cache=True)
def permute_backward_kernel1(dqkv, dq, dk, dv):
    B, NH, T, hs = dq.shape
    i = cuda.grid(1)
    if i < dq.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        dqkv[b, t, h * hs + d] = dq[b, h, t, d]
        dqkv[b, t, (NH + h) * hs + d] = dk[b, h, t, d]
        dqkv[b, t, (2 * NH + h) * hs + d] = dv[b, h, t, d]


@permute_backward.version(1, "a thread an element")
def permute_backward1(dqkv, dq, dk, dv, *, block_size=256, stream=0):
    """dqkv: float32 (B, T, 3*NH*hs); dq, dk, dv: (B, NH, T, hs), on the device."""
    permute_backward_kernel1[ceil_div(dq.size, block_size), block_size, stream](dqkv, dq, dk, dv)


@cuda.jit(cache=True)
def unpermute_backward_kernel1(dinp, dout):
    B, NH, T, hs = dinp.shape
    i = cuda.grid(1)
    if i < dinp.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        dinp[b, h, t, d] = dout[b, t, h * hs + d]


@unpermute_backward.version(1, "a thread an element")
def unpermute_backward1(dinp, dout, *, block_size=256, stream=0):
    """dinp: float32 (B, NH, T, hs); dout: (B, T, NH*hs), on the device."""
    unpermute_backward_kernel1[ceil_div(dinp.size, block_size), block_size, stream](dinp, dout)
