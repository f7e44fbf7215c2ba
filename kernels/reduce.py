"""Sums and maxima over a warp or a block, shared by the kernels of every layer.

Every thread of the warp (or block) must make the call, and every one gets the result. The order of the additions is
fixed, so results are the same bits from run to run. Blocks are a multiple of 32 threads, in one dimension.
"""

import math

from kernels.device import FULL_MASK, WARP, cuda, float32


@cuda.jit(device=True, cache=True)
def warp_sum(x):
    """The sum over the warp's lanes: after a step, a lane holds the sum of the lanes that differ from it in the bits of the
    offsets so far."""
    offset = WARP // 2
    while offset > 0:  # unrolled by the compiler
        x += cuda.shfl_xor_sync(FULL_MASK, x, offset)
        offset //= 2
    return x


@cuda.jit(device=True, cache=True)
def warp_max(x):
    """The maximum over the warp's lanes."""
    offset = WARP // 2
    while offset > 0:  # unrolled by the compiler
        x = max(x, cuda.shfl_xor_sync(FULL_MASK, x, offset))
        offset //= 2
    return x


@cuda.jit(device=True, cache=True)
def warp_sum2(x, y):
    """Two sums over the warp's lanes; their shuffles overlap."""
    offset = WARP // 2
    while offset > 0:
        x += cuda.shfl_xor_sync(FULL_MASK, x, offset)
        y += cuda.shfl_xor_sync(FULL_MASK, y, offset)
        offset //= 2
    return x, y


@cuda.jit(device=True, cache=True)
def block_sum(x):
    """The sum of a float32 over the block's threads: warps first, then every warp adds the warps' sums."""
    partials = cuda.shared.array(WARP, float32)
    lane, warp = cuda.laneid, cuda.threadIdx.x >> 5
    x = warp_sum(x)
    cuda.syncthreads()  # who still reads the partials of the call before
    if lane == 0:
        partials[warp] = x
    cuda.syncthreads()
    return warp_sum(partials[lane] if lane < cuda.blockDim.x >> 5 else float32(0))


@cuda.jit(device=True, cache=True)
def block_max(x):
    """The maximum of a float32 over the block's threads."""
    partials = cuda.shared.array(WARP, float32)
    lane, warp = cuda.laneid, cuda.threadIdx.x >> 5
    x = warp_max(x)
    cuda.syncthreads()
    if lane == 0:
        partials[warp] = x
    cuda.syncthreads()
    return warp_max(partials[lane] if lane < cuda.blockDim.x >> 5 else float32(-math.inf))


@cuda.jit(device=True, cache=True)
def block_sum2(x, y):
    """Two sums of float32 over the block's threads behind one pair of barriers."""
    partials = cuda.shared.array((2, WARP), float32)
    lane, warp = cuda.laneid, cuda.threadIdx.x >> 5
    x, y = warp_sum2(x, y)
    cuda.syncthreads()
    if lane == 0:
        partials[0, warp] = x
        partials[1, warp] = y
    cuda.syncthreads()
    inside = lane < cuda.blockDim.x >> 5
    return warp_sum2(partials[0, lane] if inside else float32(0), partials[1, lane] if inside else float32(0))
