"""Sums and maxima over a warp or a block, shared by the kernels of every layer.

Every thread of the warp (or block) must make the call, and every one gets the result. The order of the additions is
fixed, so results are the same bits from run to run. Blocks are a multiple of 32 threads, in one dimension: a launcher
asks whole_warps.
"""

import math

from kernels.device import FULL_MASK, WARP, cuda, exp2_approx, float32, need


def whole_warps(block_size: int) -> int:
    """The warps of a block."""
    need(block_size % WARP == 0, f"needs a block size that is a multiple of {WARP}, got {block_size}")
    return block_size // WARP


@cuda.jit(device=True, cache=True)
def add4(a, b):
    """The sums of what two 16-byte loads gave, element by element: no other thread takes part."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@cuda.jit(device=True, cache=True)
def warp_sum(x):
    """The sum over the warp's lanes. After the step of 16 a lane holds the sum of two lanes, then of four, ..."""
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


@cuda.jit(device=True, cache=True, fastmath=True)
def moments(pivot, total, squares, count):
    """The mean and the variance of `count` numbers x, from the sums of (x - pivot) and of (x - pivot)**2."""
    shift = total / float32(count)
    return pivot + shift, max(squares / float32(count) - shift * shift, float32(0))


@cuda.jit(device=True, cache=True)
def tree_sum(shared, x):
    """The sum of x over the block's threads, a power of two: half of them add the other half's, again and again."""
    thread = cuda.threadIdx.x
    shared[thread] = x
    cuda.syncthreads()
    half = cuda.blockDim.x // 2
    while half > 0:
        if thread < half:
            shared[thread] += shared[thread + half]
        cuda.syncthreads()
        half //= 2
    return shared[0]


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


# Softmax needs the largest x of a row and then the sum of exp(x - largest). One pass is enough for both if a sum carries
# the top that its powers refer to, and is scaled when the top rises (Milakov and Gimelshein 2018). Here it is a sum of
# powers of 2, and top is the largest x times log2(e), rounded. The rounding does no harm as long as all powers refer to
# the same top, itself included, and the product with log2(e) is not rounded before top is taken off: hence the fma.

LOG2E = float32(math.log2(math.e))
LN2 = float32(math.log(2))
LOWEST = float32(-1e38)  # below every logit. Not minus infinity: fastmath promises the compiler that there is none


@cuda.jit(device=True, cache=True, fastmath=True)
def power(x, top):
    """2**(x log2(e) - top), which is exp(x) to a factor."""
    return exp2_approx(cuda.fma(LOG2E, x, -top))


@cuda.jit(device=True, cache=True, fastmath=True)
def online_add(top, total, x):
    """(top, total) of some numbers, with one more."""
    if LOG2E * x > top:
        total *= exp2_approx(top - LOG2E * x)
        top = LOG2E * x
    return top, total + power(x, top)


@cuda.jit(device=True, cache=True, fastmath=True)
def online_add4(top, total, a, b, c, d):
    """(top, total) of some numbers, with four more: one scaling for all of them, and no branch."""
    largest = max(top, LOG2E * max(max(a, b), max(c, d)))
    powers = (power(a, largest) + power(b, largest)) + (power(c, largest) + power(d, largest))
    return largest, total * exp2_approx(top - largest) + powers


@cuda.jit(device=True, cache=True, fastmath=True)
def warp_online(top, total):
    """(top, total) of all the numbers of the warp's lanes."""
    largest = warp_max(top)
    return largest, warp_sum(total * exp2_approx(top - largest))


@cuda.jit(device=True, cache=True, fastmath=True)
def block_online(top, total):
    """(top, total) of all the numbers of the block's threads."""
    partials = cuda.shared.array((2, WARP), float32)
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    top, total = warp_online(top, total)
    cuda.syncthreads()
    if lane == 0:
        partials[0, warp] = top
        partials[1, warp] = total
    cuda.syncthreads()
    inside = lane < cuda.blockDim.x >> 5
    return warp_online(partials[0, lane] if inside else LOWEST, partials[1, lane] if inside else float32(0))
