"""Permute forward: q, k, v (B,NH,T,hs) out of qkv (B,T,3C). Unpermute forward: the heads (B,NH,T,hs) back to (B,T,C).

version 1: a thread an element
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda
from kernels.op import Op

PERMUTE_SHAPES = {
    "shape": {"B": 8, "T": 1024, "NH": 12, "hs": 64},
    "small": {"B": 2, "T": 9, "NH": 3, "hs": 8},
    "odd": [{"B": 2, "T": 5, "NH": 3, "hs": hs} for hs in (1, 3, 33, 64, 100)] + [{"B": 1, "T": 1, "NH": 25, "hs": 64}],
    "trainer_shapes": [{"B": 4, "T": 1024, "NH": 12, "hs": 64}],
}

permute_forward = Op(
    reference=cpu_reference.permute_forward,
    inputs=lambda rng, B, T, NH, hs: {"qkv": rng.standard_normal((B, T, 3 * NH * hs), dtype=np.float32)},
    outputs=lambda B, T, NH, hs: {name: (B, NH, T, hs) for name in "qkv"},
    bytes_moved=lambda B, T, NH, hs: 2 * 4 * B * T * 3 * NH * hs,
    **PERMUTE_SHAPES,
)

unpermute_forward = Op(
    reference=cpu_reference.unpermute_forward,
    inputs=lambda rng, B, T, NH, hs: {"inp": rng.standard_normal((B, NH, T, hs), dtype=np.float32)},
    outputs=lambda B, T, NH, hs: {"out": (B, T, NH * hs)},
    bytes_moved=lambda B, T, NH, hs: 2 * 4 * B * T * NH * hs,
    **PERMUTE_SHAPES,
)


@cuda.jit(cache=True)
def permute_forward_kernel1(q, k, v, qkv):
    B, NH, T, hs = q.shape
    i = cuda.grid(1)
    if i < q.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        q[b, h, t, d] = qkv[b, t, h * hs + d]
        k[b, h, t, d] = qkv[b, t, (NH + h) * hs + d]
        v[b, h, t, d] = qkv[b, t, (2 * NH + h) * hs + d]


@permute_forward.version(1, "a thread an element")
def permute_forward1(q, k, v, qkv, *, block_size=256, stream=0):
    """q, k, v: float32 (B, NH, T, hs); qkv: (B, T, 3*NH*hs), on the device."""
    permute_forward_kernel1[ceil_div(q.size, block_size), block_size, stream](q, k, v, qkv)


@cuda.jit(cache=True)
def unpermute_forward_kernel1(out, inp):
    B, NH, T, hs = inp.shape
    i = cuda.grid(1)
    if i < inp.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        out[b, t, h * hs + d] = inp[b, h, t, d]


@unpermute_forward.version(1, "a thread an element")
def unpermute_forward1(out, inp, *, block_size=256, stream=0):
    """out: float32 (B, T, NH*hs); inp: (B, NH, T, hs), on the device."""
    unpermute_forward_kernel1[ceil_div(inp.size, block_size), block_size, stream](out, inp)
