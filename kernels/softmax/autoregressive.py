"""The softmax of attention's scores (B, NH, T, T), forward and backward: row t sees columns 0 to t, the rest is zero.

    att = softmax(scale * preatt)        dpreatt = scale * att * (datt - sum of att * datt)

What stands right of the diagonal of the inputs is never used. The story is told in doc/softmax.md.

forward, version 1: a thread a row
forward, version 2: a warp a row, maximum and sum online
forward, version 3: the row in the warp's registers, read once, 16-byte loads and stores
backward, version 1: a thread a row
backward, version 2: a warp a row
backward, version 3: the row in the warp's registers, read once, 16-byte loads and stores
"""

import functools

import numpy as np

import cpu_reference
from kernels.device import WARP, ceil_div, cuda, exp2_approx, float32, load4_streaming, need, store4_streaming
from kernels.op import Op
from kernels.reduce import LOG2E, LOWEST, online_add, power, warp_max, warp_online, warp_sum, whole_warps


def lower_triangle(rng, B, NH, T):
    """Random numbers, and NaN right of the diagonal."""
    square = rng.standard_normal((B, NH, T, T), dtype=np.float32)
    square[:, :, np.triu(np.ones((T, T), bool), 1)] = np.nan
    return square


def bytes_moved(arrays_read):
    """Of so many arrays the diagonal and what is left of it is read; one array is written."""
    return lambda B, NH, T: 4 * B * NH * (arrays_read * T * (T + 1) // 2 + T * T)


SHAPES = {
    "shape": {"B": 8, "NH": 12, "T": 1024},
    "small": {"B": 1, "NH": 2, "T": 20},
    "odd": [{"B": B, "NH": NH, "T": T} for B, NH, T in ((1, 1, 1), (2, 1, 3), (1, 2, 33), (1, 1, 132))],
    "trainer_shapes": [{"B": 4, "NH": 12, "T": 1024}],
}

softmax_autoregressive_forward = Op(
    reference=cpu_reference.softmax_autoregressive_forward,
    inputs=lambda rng, B, NH, T: {"preatt": 8 * lower_triangle(rng, B, NH, T), "scale": 0.125},
    outputs=lambda B, NH, T: {"att": (B, NH, T, T)},
    bytes_moved=bytes_moved(1),
    **SHAPES,
)

softmax_autoregressive_backward = Op(
    reference=cpu_reference.softmax_autoregressive_backward,
    inputs=lambda rng, B, NH, T: {
        "datt": lower_triangle(rng, B, NH, T),
        "att": np.abs(lower_triangle(rng, B, NH, T)) / T,
        "scale": 0.125,
    },
    outputs=lambda B, NH, T: {"dpreatt": (B, NH, T, T)},
    bytes_moved=bytes_moved(2),
    **SHAPES,
)


def rows_of(square):
    """(B, NH, T, T) as (B * NH * T, T)."""
    return square.reshape(square.size // square.shape[3], square.shape[3])


def warps_for(rows, block_size: int) -> int:
    """The blocks that give each row a warp."""
    return ceil_div(rows.shape[0], whole_warps(block_size))


@cuda.jit(cache=True, fastmath=True)
def softmax_autoregressive_forward_kernel1(att, preatt, scale):
    row = cuda.grid(1)
    rows, T = att.shape
    if row < rows:
        t, s = row % T, float32(scale)
        top, total = LOWEST, float32(0)
        for c in range(t + 1):
            top, total = online_add(top, total, s * preatt[row, c])
        norm = float32(1) / total
        for c in range(t + 1):
            att[row, c] = power(s * preatt[row, c], top) * norm
        for c in range(t + 1, T):
            att[row, c] = float32(0)


@softmax_autoregressive_forward.version(1, "a thread a row")
def softmax_autoregressive_forward1(att, preatt, scale, *, block_size=128, stream=0):
    """att, preatt: float32 (B, NH, T, T); scale: a float, 1 / sqrt(head size)."""
    att, preatt = rows_of(att), rows_of(preatt)
    blocks = ceil_div(att.shape[0], block_size)
    softmax_autoregressive_forward_kernel1[blocks, block_size, stream](att, preatt, scale)


@cuda.jit(cache=True, fastmath=True)
def softmax_autoregressive_forward_kernel2(att, preatt, scale):
    lane, row = cuda.threadIdx.x & 31, cuda.grid(1) // WARP
    rows, T = att.shape
    if row < rows:
        t, s = row % T, float32(scale)
        top, total = LOWEST, float32(0)
        for c in range(lane, t + 1, WARP):
            top, total = online_add(top, total, s * preatt[row, c])
        top, total = warp_online(top, total)
        norm = float32(1) / total
        for c in range(lane, T, WARP):
            att[row, c] = power(s * preatt[row, c], top) * norm if c <= t else float32(0)


@softmax_autoregressive_forward.version(2, "a warp a row")
def softmax_autoregressive_forward2(att, preatt, scale, *, block_size=256, stream=0):
    att, preatt = rows_of(att), rows_of(preatt)
    softmax_autoregressive_forward_kernel2[warps_for(att, block_size), block_size, stream](att, preatt, scale)


PIECES3 = 16  # of 16 bytes, that a lane can hold of a row: T up to 2048


@cuda.jit(device=True, cache=True)
def load_left(square, row, c, t):
    """Four columns of a row from c on, if at least the first is left of the diagonal or on it."""
    if c <= t:
        return load4_streaming(square, row * square.shape[1] + c)
    return float32(0), float32(0), float32(0), float32(0)


@functools.cache
def make_softmax_autoregressive_forward_kernel3(T):
    """The kernel for rows of T columns. The compiler knows T: it unrolls the loops, and x becomes registers."""
    pieces = ceil_div(T, 4 * WARP)

    @cuda.jit(cache=True, fastmath=True)
    def softmax_autoregressive_forward_kernel3(att, preatt, scale):
        x = cuda.local.array((pieces, 4), float32)
        first, row = 4 * (cuda.threadIdx.x & 31), cuda.grid(1) // WARP
        if row < att.shape[0]:
            t, s = row % T, float32(scale) * LOG2E
            for k in range(pieces):
                x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load_left(preatt, row, first + 4 * WARP * k, t)
            top = LOWEST
            for k in range(pieces):
                for j in range(4):
                    if first + 4 * WARP * k + j <= t:
                        top = max(top, s * x[k, j])
            top = warp_max(top)
            total = float32(0)
            for k in range(pieces):
                for j in range(4):
                    c = first + 4 * WARP * k + j
                    x[k, j] = exp2_approx(cuda.fma(s, x[k, j], -top)) if c <= t else float32(0)
                    total += x[k, j]
            norm = float32(1) / warp_sum(total)
            for k in range(pieces):
                c = first + 4 * WARP * k
                if c < T:
                    a, b, d, e = x[k, 0] * norm, x[k, 1] * norm, x[k, 2] * norm, x[k, 3] * norm
                    store4_streaming(att, row * T + c, a, b, d, e)

    return softmax_autoregressive_forward_kernel3


@softmax_autoregressive_forward.version(3, "the row in registers, read once, 16-byte loads and stores")
def softmax_autoregressive_forward3(att, preatt, scale, *, block_size=256, stream=0):
    """Rows that are no multiple of 16 bytes, or have no room in a warp's registers, go the way of version 2."""
    T = att.shape[3]
    if T % 4 or T > 4 * WARP * PIECES3:
        softmax_autoregressive_forward2(att, preatt, scale, stream=stream)
        return
    att, preatt = rows_of(att), rows_of(preatt)
    kernel = make_softmax_autoregressive_forward_kernel3(T)
    kernel[warps_for(att, block_size), block_size, stream](att, preatt, scale)


@cuda.jit(cache=True, fastmath=True)
def softmax_autoregressive_backward_kernel1(dpreatt, datt, att, scale):
    row = cuda.grid(1)
    rows, T = att.shape
    if row < rows:
        t, s = row % T, float32(scale)
        delta = float32(0)
        for c in range(t + 1):
            delta += att[row, c] * datt[row, c]
        for c in range(t + 1):
            dpreatt[row, c] = s * att[row, c] * (datt[row, c] - delta)
        for c in range(t + 1, T):
            dpreatt[row, c] = float32(0)


@softmax_autoregressive_backward.version(1, "a thread a row")
def softmax_autoregressive_backward1(dpreatt, datt, att, scale, *, block_size=128, stream=0):
    """dpreatt, datt, att: float32 (B, NH, T, T); scale: the forward's."""
    dpreatt, datt, att = rows_of(dpreatt), rows_of(datt), rows_of(att)
    blocks = ceil_div(att.shape[0], block_size)
    softmax_autoregressive_backward_kernel1[blocks, block_size, stream](dpreatt, datt, att, scale)


@cuda.jit(cache=True, fastmath=True)
def softmax_autoregressive_backward_kernel2(dpreatt, datt, att, scale):
    lane, row = cuda.threadIdx.x & 31, cuda.grid(1) // WARP
    rows, T = att.shape
    if row < rows:
        t, s = row % T, float32(scale)
        delta = float32(0)
        for c in range(lane, t + 1, WARP):
            delta += att[row, c] * datt[row, c]
        delta = warp_sum(delta)
        for c in range(lane, T, WARP):
            dpreatt[row, c] = s * att[row, c] * (datt[row, c] - delta) if c <= t else float32(0)


@softmax_autoregressive_backward.version(2, "a warp a row")
def softmax_autoregressive_backward2(dpreatt, datt, att, scale, *, block_size=256, stream=0):
    dpreatt, datt, att = rows_of(dpreatt), rows_of(datt), rows_of(att)
    softmax_autoregressive_backward_kernel2[warps_for(att, block_size), block_size, stream](dpreatt, datt, att, scale)


@functools.cache
def make_softmax_autoregressive_backward_kernel3(T):
    pieces = ceil_div(T, 4 * WARP)

    @cuda.jit(cache=True, fastmath=True)
    def softmax_autoregressive_backward_kernel3(dpreatt, datt, att, scale):
        x, dx = cuda.local.array((pieces, 4), float32), cuda.local.array((pieces, 4), float32)
        first, row = 4 * (cuda.threadIdx.x & 31), cuda.grid(1) // WARP
        if row < att.shape[0]:
            t, s = row % T, float32(scale)
            for k in range(pieces):
                x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load_left(att, row, first + 4 * WARP * k, t)
                dx[k, 0], dx[k, 1], dx[k, 2], dx[k, 3] = load_left(datt, row, first + 4 * WARP * k, t)
            delta = float32(0)
            for k in range(pieces):
                for j in range(4):
                    if first + 4 * WARP * k + j > t:
                        x[k, j], dx[k, j] = float32(0), float32(0)
                    delta += x[k, j] * dx[k, j]
            delta = warp_sum(delta)
            for k in range(pieces):
                for j in range(4):
                    x[k, j] *= s * (dx[k, j] - delta)
            for k in range(pieces):
                if first + 4 * WARP * k < T:
                    store4_streaming(dpreatt, row * T + first + 4 * WARP * k, x[k, 0], x[k, 1], x[k, 2], x[k, 3])

    return softmax_autoregressive_backward_kernel3


@softmax_autoregressive_backward.version(3, "the row in registers, read once, 16-byte loads and stores")
def softmax_autoregressive_backward3(dpreatt, datt, att, scale, *, block_size=256, stream=0):
    """Rows that are no multiple of 16 bytes, or have no room in a warp's registers, go the way of version 2."""
    need(block_size <= 512, f"needs blocks of at most 512 threads, which hold two rows a warp, got {block_size}")
    T = att.shape[3]
    if T % 4 or T > 4 * WARP * PIECES3 // 2:
        softmax_autoregressive_backward2(dpreatt, datt, att, scale, stream=stream)
        return
    dpreatt, datt, att = rows_of(dpreatt), rows_of(datt), rows_of(att)
    kernel = make_softmax_autoregressive_backward_kernel3(T)
    kernel[warps_for(att, block_size), block_size, stream](dpreatt, datt, att, scale)
