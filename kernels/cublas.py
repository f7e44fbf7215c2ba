"""cuBLASLt through nvmath-python's bindings: version 0 of every matrix product, the bar that the others are held against.

cuBLAS counts columns first. A row-major (M, K) array is, byte for byte, a column-major (K, M) one: its own transpose. So
D = A @ B is asked for as D.T = B.T @ A.T: the operands change places and keep their transposition flags; nothing moves.

The workspace is ours and is there before any capture, so that a product can be captured into a CUDA graph.

cuBLASLt's heuristic names algorithms for a shape, the likeliest first, and is at times wrong by half. So the first call
with a shape times them all (kernels/choices.py).
"""

import ctypes
import functools
import math
from dataclasses import dataclass

import numpy as np

from kernels.choices import Choices
from kernels.device import TARGET, ShapeError, address, cuda, scratch
from kernels.target import CACHE_FOLDER

WORKSPACE_BYTES = 64 << 20
CANDIDATES = 16  # algorithms that the heuristic is asked for
CUDA_R_32F = 0  # cudaDataType_t
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


@functools.cache
def missing() -> str | None:
    """Why cuBLAS cannot be used here, in a sentence; None where it can."""
    if TARGET != "gpu":
        return "needs an NVIDIA GPU"
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()  # loads the library
    except (ImportError, OSError, RuntimeError) as error:  # no bindings, or no library behind them
        return f"needs nvmath-python and cuBLAS: pip install 'nvmath-python[cu13]' ({type(error).__name__})"
    return None


@dataclass(frozen=True)
class Matrix:
    """Where a row-major float32 (rows, columns) matrix lies, its rows `ld` floats apart; or `count` such, `stride` apart."""

    pointer: int
    rows: int
    columns: int
    ld: int
    count: int = 1
    stride: int = 0

    @classmethod
    def of(cls, array) -> "Matrix":
        """Of a contiguous device array (rows, columns)."""
        rows, columns = array.shape
        return cls(address(array), rows, columns, columns)

    @property
    def form(self) -> tuple:
        return self.rows, self.columns, self.ld, self.count, self.stride


@functools.cache
def _handle(device: int) -> int:
    from nvmath.bindings import cublasLt

    return cublasLt.create()


def _set(setter, what: int, attribute, value, ctype) -> None:
    value = ctype(value)
    setter(what, attribute, ctypes.addressof(value), ctypes.sizeof(value))


def _layout(rows, columns, ld, count, stride) -> int:
    from nvmath.bindings import cublasLt as lt

    layout = lt.matrix_layout_create(CUDA_R_32F, columns, rows, ld)
    if count > 1:
        _set(lt.matrix_layout_set_attribute, layout, lt.MatrixLayoutAttribute.BATCH_COUNT, count, ctypes.c_int32)
        _set(lt.matrix_layout_set_attribute, layout, lt.MatrixLayoutAttribute.STRIDED_BATCH_OFFSET, stride, ctypes.c_int64)
    return layout


@functools.cache
def _plan(handle, a, b, c, d, trans_a, trans_b, epilogue, aux_ld, tf32, alignment):
    """The description of a product and the algorithms for it, made once a shape. a, b, c, d: Matrix.form."""
    from nvmath.bindings import cublas
    from nvmath.bindings import cublasLt as lt

    compute = cublas.ComputeType.COMPUTE_32F_FAST_TF32 if tf32 else cublas.ComputeType.COMPUTE_32F
    description = lt.matmul_desc_create(compute, CUDA_R_32F)
    set_attribute = functools.partial(_set, lt.matmul_desc_set_attribute, description)
    what = lt.MatmulDescAttribute
    set_attribute(what.TRANSA, int(trans_b), ctypes.c_int32)
    set_attribute(what.TRANSB, int(trans_a), ctypes.c_int32)
    set_attribute(what.EPILOGUE, lt.Epilogue[epilogue], ctypes.c_uint32)
    if "BIAS" in epilogue or "BGRAD" in epilogue:  # the heuristic wants to see that there is a pointer
        set_attribute(what.BIAS_POINTER, 256, ctypes.c_int64)
    if aux_ld:
        set_attribute(what.EPILOGUE_AUX_POINTER, 256, ctypes.c_int64)
        set_attribute(what.EPILOGUE_AUX_LD, aux_ld, ctypes.c_int64)
    layouts = [_layout(*form) for form in (b, a, c, d)]

    preference = lt.matmul_preference_create()
    set_preference = functools.partial(_set, lt.matmul_preference_set_attribute, preference)
    set_preference(lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES, WORKSPACE_BYTES, ctypes.c_uint64)
    for operand in "ABCD":
        least = lt.MatmulPreferenceAttribute[f"MIN_ALIGNMENT_{operand}_BYTES"]
        set_preference(least, alignment, ctypes.c_uint32)
    results, found = lt.MatmulHeuristicResult(CANDIDATES), ctypes.c_int32(0)
    try:
        lt.matmul_algo_get_heuristic(
            handle, description, *layouts, preference, CANDIDATES, results.ptr, ctypes.addressof(found)
        )
    except lt.cuBLASLtError as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ShapeError(f"needs a shape for which cuBLASLt has an algorithm with {epilogue} ({reason})") from None
    finally:
        lt.matmul_preference_destroy(preference)
    if not found.value:
        raise ShapeError(f"needs a shape for which cuBLASLt has an algorithm with {epilogue}")
    return description, layouts, results[: found.value]


@functools.cache
def _choices(device: int) -> Choices:
    from nvmath.bindings import cublasLt

    return Choices(CACHE_FOLDER.parent, f"cublaslt-{cublasLt.get_version()}")


def product(
    d: Matrix, a: Matrix, b: Matrix, *, trans_a=False, trans_b=False, alpha=ONE, add: Matrix | None = None,
    epilogue="DEFAULT", bias=None, aux: Matrix | None = None, tf32: bool, stream=0,
) -> None:  # fmt: skip
    """d = epilogue(alpha * op(a) @ op(b) + add), where op transposes if its flag says so.

    add: a matrix like d, or d itself. epilogue: a name of cublasLtEpilogue_t; bias and aux are the vector and the matrix that
    it reads or writes. alpha: a float32 (1,) array of the host. Raises ShapeError where cuBLASLt refuses.
    """
    from nvmath.bindings import cublasLt as lt

    matrices = (a, b, add or d, d)
    extra = [address(bias)] if bias is not None else []
    extra += [aux.pointer] if aux else []
    alignment = math.gcd(256, *(m.pointer for m in matrices), *extra)
    handle = _handle(cuda.get_current_device().id)
    key = (*(m.form for m in matrices), trans_a, trans_b, epilogue, aux.ld if aux else 0, tf32, alignment)
    description, (b_layout, a_layout, c_layout, d_layout), candidates = _plan(handle, *key)
    for attribute, pointer in (("BIAS_POINTER", bias), ("EPILOGUE_AUX_POINTER", aux)):
        if pointer is not None:
            value = pointer.pointer if isinstance(pointer, Matrix) else address(pointer)
            _set(lt.matmul_desc_set_attribute, description, lt.MatmulDescAttribute[attribute], value, ctypes.c_int64)
    workspace = scratch("cuBLASLt's workspace", WORKSPACE_BYTES, np.uint8)

    def run(index: int, stream=stream) -> None:
        lt.matmul(
            handle, description, alpha.ctypes.data, b.pointer, b_layout, a.pointer, a_layout,
            (ONE if add else ZERO).ctypes.data, (add or d).pointer, c_layout, d.pointer, d_layout,
            candidates[index].ptr, address(workspace), WORKSPACE_BYTES, int(stream),
        )  # fmt: skip

    may_run = add is None or add.pointer != d.pointer
    run(_choices(cuda.get_current_device().id).index(key, run, len(candidates), stream, may_run))
