"""What becomes of each sum of a tile of a @ b, one of six things, while it is still in registers. Neighbours of a row are finished
together: 8 or 16 bytes a load or store, where the array is aligned."""

import functools
import math

from kernels.device import cuda, float32, int64, load4, store2, store4
from kernels.gelu.gate import gelu_gate
from kernels.intrinsics import ptx

STORE, BIAS, BIAS_GELU, BIAS_RESIDUAL, SLOPE, ADD = range(6)
ROOT = math.sqrt(2 / math.pi)  # of GELU


@ptx("add.f32 $0, $1, 0f00000000;", returns=float32, takes=(float32,), pure=True)
def moved(x):
    """x in another register: plus zero, which the compiler does not see through."""
    return x


@functools.cache
def finished_of(epilogue: int):
    """A device function: what becomes of a sum x, with its bias b and what stands in the extra array, e. (For BIAS_GELU: what
    stands before the GELU.)"""

    @cuda.jit(device=True)
    def finished(x, b, e):
        if epilogue == BIAS or epilogue == BIAS_GELU:
            return x + b
        if epilogue == BIAS_RESIDUAL:
            return e + (x + b)
        if epilogue == ADD:
            return e + x
        if epilogue == SLOPE:
            gate = gelu_gate(e)
            slope = float32(2 * ROOT) * (float32(1) + float32(3 * 0.044715) * e * e)
            return x * (gate + e * gate * (float32(1) - gate) * slope)
        return x

    return finished


@functools.cache
def epilogue_of(epilogue: int, width: int, aligned: bool):
    """Three device functions for `width` neighbours of a row: load the bias, load the extra array, finish and store.

    All loads of a tile come before its stores, or each would wait for the one before: the compiler cannot know that out is
    another array.
    """
    has_bias = epilogue in (BIAS, BIAS_GELU, BIAS_RESIDUAL)
    has_extra = epilogue in (BIAS_RESIDUAL, SLOPE, ADD)
    finished = finished_of(epilogue)

    @cuda.jit(device=True)
    def load_bias(b, i, bias, column, N):
        if has_bias and aligned and width == 4:
            if column < N:
                b[i], b[i + 1], b[i + 2], b[i + 3] = load4(bias, column)
        elif has_bias:
            for j in range(width):
                if column + j < N:
                    b[i + j] = bias[column + j]

    @cuda.jit(device=True)
    def load_extra(e, i, extra, row, column, rows, N):
        if has_extra and row < rows:
            if aligned and width == 4:
                if column < N:
                    e[i], e[i + 1], e[i + 2], e[i + 3] = load4(extra, int64(row) * N + column)
            else:
                for j in range(width):
                    if column + j < N:
                        e[i + j] = extra[row, column + j]

    @cuda.jit(device=True)
    def store(out, extra, row, column, rows, N, x, b, e):
        """x, b, e: tuples of `width`."""
        if row < rows and column < N:
            if aligned and width == 2:
                at = int64(row) * N + column
                y0, y1 = finished(x[0], b[0], e[0]), finished(x[1], b[1], e[1])
                if epilogue == BIAS_GELU:
                    store2(extra, at, y0, y1)
                    y0, y1 = y0 * gelu_gate(y0), y1 * gelu_gate(y1)
                store2(out, at, y0, y1)
            else:
                for j in range(width):
                    if column + j < N:
                        y = finished(x[j], b[j], e[j])
                        if epilogue == BIAS_GELU:
                            extra[row, column + j] = y
                            y *= gelu_gate(y)
                        out[row, column + j] = y

    @cuda.jit(device=True)
    def store_four(out, extra, row, column, rows, N, x, b, e):
        """The same for four. What is stored at once stands in four neighbouring registers; where sums are added up, an even and an
        odd one should be read at a time. So sums are moved before the store, and there is no branch around the arithmetic."""
        at, inside = int64(row) * N + column, row < rows and column < N
        y0, y1 = finished(moved(x[0]), b[0], e[0]), finished(moved(x[1]), b[1], e[1])
        y2, y3 = finished(moved(x[2]), b[2], e[2]), finished(moved(x[3]), b[3], e[3])
        if epilogue == BIAS_GELU:
            if inside:
                store4(extra, at, y0, y1, y2, y3)
            y0, y1, y2, y3 = y0 * gelu_gate(y0), y1 * gelu_gate(y1), y2 * gelu_gate(y2), y3 * gelu_gate(y3)
        if inside:
            store4(out, at, y0, y1, y2, y3)

    return load_bias, load_extra, store_four if aligned and width == 4 else store
