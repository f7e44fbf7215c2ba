"""What kernels are written with: they take `cuda`, its types and our intrinsics from here, and never from numba.

On a GPU `cuda` is numba.cuda. Without one it is kernels.simulator, which runs the same kernels in plain Python, threads,
warps and all. (What compiles, records launches or makes an intrinsic knows numba's inside, and names it itself.)
"""

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np

from kernels.target import SIMULATE, TARGET

if SIMULATE:
    from kernels.simulator import cuda, float32, float64, int32, int64, uint32, uint64
else:
    from numba import cuda, float32, float64, int32, int64, uint32, uint64

    if TARGET == "compile":
        from kernels import compile as _compile

        _compile.replace_launches()

from kernels.intrinsics import *  # noqa: E402, F403  (after cuda is known)

__all__ = [
    "FULL_MASK", "SIMULATE", "TARGET", "WARP", "OutOfMemory", "ShapeError", "address", "allocate", "big_shared",
    "card_name", "ceil_div", "compute_capability", "cuda", "float32", "float64", "int32", "int64", "keep_compiled",
    "multiprocessors", "need", "scratch", "scratch_of", "shared_limit", "synchronize", "to_device", "to_host",
    "uint32", "uint64", "zero",
]  # fmt: skip

WARP = 32
FULL_MASK = 0xFFFFFFFF


class ShapeError(ValueError):
    """A version says at launch which shape it needs."""


def need(condition: bool, sentence: str) -> None:
    """Refuse a shape: `need(C % 4 == 0, f"needs C a multiple of 4, got {C}")`."""
    if not condition:
        raise ShapeError(sentence)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def to_device(array: np.ndarray):
    """A copy of a host array that kernels can be given."""
    return cuda.to_device(np.ascontiguousarray(array)) if TARGET == "gpu" else np.array(array, order="C")


def address(array) -> int:
    """Where a device array begins."""
    return array.__cuda_array_interface__["data"][0] if TARGET == "gpu" else array.ctypes.data


def to_host(array) -> np.ndarray:
    return array.copy_to_host() if hasattr(array, "copy_to_host") else np.asarray(array)


def synchronize() -> None:
    """Wait for everything that was launched; the simulator has done it by the time a launch returns."""
    if TARGET == "gpu":
        cuda.synchronize()


class OutOfMemory(MemoryError):
    """One line: how much was asked, how much is free, what to lower."""


def allocate(shape, dtype=np.float32, what: str = "an array"):
    """An uninitialised device array. Raises OutOfMemory, which names what it was for."""
    if TARGET != "gpu":
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)  # NaN: what reads it before it is written shows
        return array
    asked = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    free = cuda.current_context().get_memory_info().free
    if asked > free:
        needs = f"{what}: {asked >> 20:,} MiB asked, {free >> 20:,} MiB free"
        raise OutOfMemory(f"out of GPU memory for {needs}: lower the batch size (-b) or the sequence length (-t)")
    return cuda.device_array(shape, dtype)


_scratch: dict = {}  # owner -> name, shape and type -> array
_owner: Hashable = None


@contextmanager
def scratch_of(owner: Hashable) -> Iterator[None]:
    """Within it, scratch arrays are this owner's: a model's, or those of launches that run beside others."""
    global _owner
    before, _owner = _owner, owner
    try:
        yield
    finally:
        _owner = before


def scratch(name: str, shape, dtype=np.float32, zeroed: bool = False):
    """A device array that outlives the call, so that a captured graph finds it where it was. One for each owner, name and shape;
    what is in it is whatever the last user of that name left, at first zeros if `zeroed`."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    arrays, key = _scratch.setdefault(_owner, {}), (name, shape, np.dtype(dtype))
    if key not in arrays:
        arrays[key] = to_device(np.zeros(shape, dtype)) if zeroed else allocate(shape, dtype, f"the scratch of {name}")
    return arrays[key]


def free_scratch(*owners: Hashable) -> None:
    """Give the scratch memory of these owners back, of all if none is named. Graphs that were captured with it must not be
    launched again."""
    for owner in owners or tuple(_scratch):
        _scratch.pop(owner, None)


def big_shared(kernel, grid, block, stream, nbytes: int):
    """`kernel[grid, block, stream, nbytes]`, where nbytes of dynamic shared memory may pass the 48 KB that a block gets
    unasked (CUDA C++ Programming Guide, Shared Memory 9.0). ShapeError where the card has not so many."""
    need(nbytes <= shared_limit(), f"needs {nbytes} bytes of shared memory a block, and this card gives {shared_limit()}")
    config = kernel[grid, block, stream, nbytes]
    if TARGET == "gpu" and nbytes > 48 * 1024 and not config.pre_launch_callbacks:
        config.pre_launch_callbacks.append(_raise_shared_limit)
    return config


def _raise_shared_limit(kernel, config) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    function = kernel._codelibrary.get_cufunc()
    (error,) = driver.cuKernelSetAttribute(attribute, config.sharedmem, function.handle, cuda.get_current_device().id)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{config.sharedmem} bytes of shared memory a block: {error.name}")


def keep_compiled(kernel, *key):
    """Caches on disk a kernel that a factory made, under the factory's arguments. Numba's own key for a closure is what it
    closes over; where that holds device functions it is another one in every process, and nothing would be found again."""
    if TARGET == "gpu":
        kernel.enable_caching()
        kernel._cache._index_key = lambda signature, codegen: (signature, codegen.magic_tuple(), repr(key))
    return kernel


def compute_capability() -> tuple[int, int]:
    """(9, 0) on an H100. The simulator plays a card that knows every instruction."""
    return tuple(cuda.get_current_device().compute_capability) if TARGET == "gpu" else (9, 0)


def card_name() -> str:
    """As in "NVIDIA H200"; "simulator" where there is no card."""
    if TARGET != "gpu":
        return "simulator"
    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else name


def multiprocessors() -> int:
    """How many multiprocessors there are to fill; few in the simulator, where each block costs time."""
    return cuda.get_current_device().MULTIPROCESSOR_COUNT if TARGET == "gpu" else 4


def shared_limit() -> int:
    """Bytes of shared memory that a block can have at the most (227 KB on an H100, 99 KB on an RTX 4090)."""
    return cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN if TARGET == "gpu" else 227 * 1024


def zero(array, stream=0) -> None:
    """Fill a device array with zero bytes."""
    if TARGET != "gpu":
        array.fill(0)
        return
    from numba.cuda.cudadrv.driver import device_memset

    device_memset(array.gpu_data, 0, array.nbytes, stream=stream)
