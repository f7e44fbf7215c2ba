"""A CUDA simulator: this module is the `cuda` that kernels see where there is no GPU.

It runs the same kernels in plain Python: blocks one after the other, the threads of a block by turns, each in a greenlet,
so that nothing ever runs beside anything else. A thread runs until it must wait for others: at a warp collective
(shuffle, vote, syncwarp) or at a barrier. Warps are never in lockstep, as on every GPU since Volta: what a warp must agree
on has to be said with a `_sync`. And a GPU promises nothing about who comes first, so the blocks of a grid take four
schedules by turns, for a missing barrier to show in one of them: a warp runs ahead of all others as far as it can, or the
warps keep abreast; and the block's first thread starts, or its last. (See SCHEDULES.)

Where a GPU hangs, crashes or computes nonsense, a SimulatorError names kernel, source line, block and thread:
an index out of bounds (negative ones too, which Numba takes from the end), a mask without the caller, a warp whose lanes
name different masks, a shuffle that reads a lane that has exited, a barrier that not all threads reach. Shared and local
arrays start as NaN (integers: POISON), so that reading what nobody wrote shows.

Numbers are NumPy's. Floats loaded from a float32 array stay float32 through arithmetic and through `math`, as they do in
Numba. Two differences remain. A bare 0.5 in the source, or an integer, takes the type of the float32 that it meets; Numba
goes on in float64 from there, which is slower on a GPU, never less exact. And integers are Python's, that never overflow;
Numba's are 64 bits wide, once computed with.

What only a GPU can do: blocks that wait for one another (they run in turn here, and one that spins would spin for ever).
"""

import functools
import itertools
import math
import os
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

FULL_MASK = 0xFFFFFFFF
POISON = 0x7FFADBAD  # a NaN if read as float32, and twice in a row as float64; 2147146669 if read as int32
STATIC_SHARED_LIMIT = 48 * 1024  # bytes a block: CUDA C++ Programming Guide, Technical Specifications
SHARED_LIMIT = 227 * 1024  # static and dynamic together, compute capability 9.0

warpsize = 32


class SimulatorError(RuntimeError):
    """What is wrong with a kernel, in one line."""


# Arrays ---------------------------------------------------------------------------------------------------------------


class Array:
    """An array as a kernel sees it: a negative index is an error. (NumPy itself refuses those past the end.)

    It holds a NumPy array rather than being one: Python calls `__getitem__` of a subclass of ndarray half as fast.
    """

    __slots__ = ("data", "flat", "ndim", "shape", "size")

    def __init__(self, data: np.ndarray):
        self.data, self.ndim, self.shape, self.size = data, data.ndim, data.shape, data.size
        self.flat = None

    def __getitem__(self, index):
        if index.__class__ is int:
            if index < 0:
                _refuse(index)
        else:
            _check(index)
        value = self.data[index]
        return Array(value) if value.__class__ is np.ndarray else value

    def __setitem__(self, index, value):
        if index.__class__ is int:
            if index < 0:
                _refuse(index)
        else:
            _check(index)
        self.data[index] = value.data if value.__class__ in ARRAYS else value

    def __len__(self):
        return self.shape[0]

    def __getattr__(self, name):
        """Whatever else an array has: dtype, strides, reshape(...), view(...)."""
        value = getattr(self.data, name)
        return (lambda *args, **options: checked(value(*args, **options))) if callable(value) else checked(value)

    def flat_at(self, i: int, count: int) -> np.ndarray:
        """The elements counted flat, of which `count` from the i-th on must be there, and aligned to their common size."""
        if self.flat is None:  # elements, address, size of one in bytes
            if not self.data.flags.c_contiguous:
                raise SimulatorError(f"an array with strides {self.data.strides} is not C-contiguous")
            self.flat = self.data.reshape(-1), self.data.ctypes.data, self.data.itemsize
        flat, address, size = self.flat
        if i < 0 or i + count > self.size:
            raise IndexError(f"elements {i} to {i + count - 1} are out of bounds for the {self.size}")
        if (address + i * size) % (count * size):
            raise SimulatorError(
                f"misaligned address: element {i} does not stand at a multiple of {count * size} bytes "
                "(shared arrays need alignment=16)"
            )
        return flat


class IntArray(Array):
    """Integers load as Python's, which do not overflow, and wrap round when they are stored, as in C."""

    __slots__ = ()

    def __getitem__(self, index):
        if index.__class__ is int:
            if index < 0:
                _refuse(index)
        else:
            _check(index)
        value = self.data[index]
        return IntArray(value) if value.__class__ is np.ndarray else int(value)

    def __setitem__(self, index, value):
        try:
            Array.__setitem__(self, index, value)
        except OverflowError:
            self.data[index] = np.array(value & 0xFFFFFFFFFFFFFFFF, np.uint64).astype(self.data.dtype)


ARRAYS = (Array, IntArray)


def _check(index):
    try:
        for i in index:
            if i < 0:
                _refuse(i)
    except TypeError:  # a single NumPy integer, or slices
        for i in index if index.__class__ is tuple else (index,):
            if i.__class__ is not slice and i is not Ellipsis and i < 0:
                _refuse(i)


def _refuse(index):
    raise IndexError(f"index {index} is negative")


class LocalArray(dict):
    """A thread's own array, {index: value}: the innermost loops read these, and Python reads nothing faster than a dict.
    An index that is not there comes to `__missing__`."""

    __slots__ = ("cast", "kind", "like")

    def __init__(self, like: np.ndarray, kind: type | None, cast, values: dict):
        """like: an array of this shape and type. cast: what makes values of this type, save of those of class `kind`."""
        dict.__init__(self, values)
        self.like, self.kind, self.cast = like, kind, cast

    def __missing__(self, index):
        if isinstance(index, int) and 0 <= index < self.like.shape[0]:
            raise IndexError(f"index {index}: a local array of {self.like.ndim} dimensions takes as many indices")
        raise IndexError(f"index {index} is out of bounds for a local array of shape {self.like.shape}")

    def __setitem__(self, index, value, put=dict.__setitem__):
        if index not in self:
            self.__missing__(index)
        put(self, index, value if value.__class__ is self.kind else self.cast(value))

    def __len__(self):
        return self.like.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name):
        """shape, size, ndim, dtype."""
        return getattr(self.like, name)

    def flat_at(self, i, count):
        raise SimulatorError("a local array has no address: it lives in registers")


def checked(value):
    """A kernel's argument as the kernel sees it: an array whose indices are checked, or a number."""
    if isinstance(value, np.ndarray):
        return (IntArray if value.dtype.kind in "iu" else Array)(value)
    if isinstance(value, np.integer):
        return int(value)
    if value.__class__ is float:
        return np.float64(value)  # as Numba has it; a plain float would turn into the float32 that it meets
    return tuple(map(checked, value)) if isinstance(value, tuple) else value


def _dtype(dtype) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        return np.dtype(str(dtype))  # numba.float32


def _poisoned(shape, dtype, alignment) -> np.ndarray:
    """A new array of poison, which is aligned as asked and no better, so that a vector access that was just lucky shows."""
    dtype = _dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    alignment = alignment or dtype.itemsize
    period = max(256, 2 * alignment)
    memory = np.full((size + 2 * period) // 4 + 1, POISON, np.uint32)
    start = alignment - memory.ctypes.data % period
    start += period * (start < 0)
    return memory.view(np.uint8)[start : start + size].view(dtype).reshape(shape)


def _shape(shape) -> tuple:
    return shape if isinstance(shape, tuple) else (shape,)


def _shared_array(shape, dtype, alignment=None):
    """cuda.shared.array: one array a block for each place in the source that declares one. Shape 0: all of the dynamic
    shared memory that the launch asked for."""
    shape = _shape(shape)
    frame = sys._getframe(1)
    arrays = _launch.shared
    place = (frame.f_code, frame.f_lasti)
    if place not in arrays:
        if shape == (0,):
            size = _launch.dynamic_bytes // _dtype(dtype).itemsize * _dtype(dtype).itemsize
            array = _launch.dynamic[:size].view(_dtype(dtype))
        else:
            array = _poisoned(shape, dtype, alignment)
            _launch.static_bytes += array.nbytes
            if _launch.static_bytes > STATIC_SHARED_LIMIT:
                raise SimulatorError(
                    f"{_launch.static_bytes} bytes of static shared memory, a block gets {STATIC_SHARED_LIMIT}"
                )
        arrays[place] = checked(array)
        _launch.shared_ranges.append((array.ctypes.data, array.ctypes.data + array.nbytes))
    return arrays[place]


def _local_array(shape, dtype, alignment=None):
    return LocalArray(*_template(_shape(shape), dtype))


@functools.cache
def _template(shape, dtype) -> tuple:
    """What a local array is made of, before anybody wrote."""
    like = _poisoned(shape, dtype, None)
    array = checked(like)
    indices = range(shape[0]) if len(shape) == 1 else itertools.product(*map(range, shape))
    kind, cast = _CASTS.get(like.dtype.name, (None, like.dtype.type))
    return like, kind, cast, {index: array[index] for index in indices}


def _constant_array(array):
    array = np.asarray(array).view()
    array.flags.writeable = False
    return checked(array)


shared = SimpleNamespace(array=_shared_array)
local = SimpleNamespace(array=_local_array)
const = SimpleNamespace(array_like=_constant_array)


# A bare np.float32(x) takes 0.7 us. These are called as Numba's types are, and may be named as the type of an array.


def float32(x=0.0):
    if x.__class__ is np.float32:
        return x
    if x.__class__ is float or x.__class__ is int:
        return _ONE * x
    return np.float32(x)


_ONE = np.float32(1)


def float64(x=0.0):
    return np.float64(x)


def int32(x=0):
    return (int(x) + 2**31 & 0xFFFFFFFF) - 2**31


def uint32(x=0):
    return int(x) & 0xFFFFFFFF


def int64(x=0):
    return (int(x) + 2**63 & 0xFFFFFFFFFFFFFFFF) - 2**63


def uint64(x=0):
    return int(x) & 0xFFFFFFFFFFFFFFFF


for _type in (float32, float64, int32, uint32, int64, uint64):
    _type.dtype = np.dtype(_type.__name__)

# dtype -> the class whose values a local array may keep as they are, and what makes such a value of another
_CASTS = {"float32": (np.float32, float32), "float64": (np.float64, float64)}
_CASTS |= {_type.__name__: (None, _type) for _type in (int32, uint32, int64, uint64)}


# Threads, and who runs next -------------------------------------------------------------------------------------------


class Dim3:
    __slots__ = ("x", "y", "z")

    def __init__(self, x, y=1, z=1):
        self.x, self.y, self.z = x, y, z

    def __repr__(self):
        return f"({self.x}, {self.y}, {self.z})"


class Thread(Dim3):
    __slots__ = ("greenlet", "lane", "waits", "warp")


class Warp:
    __slots__ = ("live", "threads", "waiting")

    def __init__(self):
        self.threads = []  # by lane
        self.live = 0  # the lanes that have not exited, a bit each
        self.waiting = {}  # (operation, mask) -> {lane: value} of the lanes that have arrived


@functools.cache
def _threads_of_a_block(x, y, z) -> tuple[list, list]:
    """All threads and all warps. They are used again by the next block, and the next launch."""
    threads, warps = [], []
    for k, j, i in itertools.product(range(z), range(y), range(x)):
        thread = Thread(i, j, k)
        thread.lane = len(threads) % warpsize
        if thread.lane == 0:
            warps.append(Warp())
        thread.warp = warps[-1]
        thread.warp.threads.append(thread)
        threads.append(thread)
    return threads, warps


# (ahead, backwards). Ahead: those who have what they waited for go on before all who have had it for longer, so that one warp
# runs into the next barrier, through code where the others have not been. Else they go on after them: warps keep abreast.
SCHEDULES = [(True, False), (False, True), (False, False), (True, True)]


class Launch:
    """A kernel on its way through the grid, one block at a time."""

    idle = []  # greenlets that wait for a thread to run; they outlive the launch, since a new one costs 10 us

    def __init__(self, kernel, args, block, dynamic_bytes):
        self.kernel = kernel
        self.args = tuple(map(checked, args))
        self.hub = getcurrent()
        if self.idle and self.idle[0].parent is not self.hub:
            self.idle.clear()  # those of another operating system thread
        self.failure = None  # (thread, exception)
        self.schedules = itertools.cycle(SCHEDULES)  # one for each block
        self.dynamic_bytes = dynamic_bytes
        self.threads, self.warps = _threads_of_a_block(block.x, block.y, block.z)

    def run_block(self):
        self.shared, self.shared_ranges, self.static_bytes = {}, [], 0
        self.dynamic = _poisoned((self.dynamic_bytes,), np.uint8, 16) if self.dynamic_bytes else np.empty(0, np.uint8)
        self.state = {}  # what intrinsics keep for the block
        self.barriers = {}  # barrier -> {thread: value} of the threads that have arrived
        self.ready = deque()  # threads that have what they waited for
        self.ahead, backwards = next(self.schedules)
        self.fresh = deque(reversed(self.threads) if backwards else self.threads)  # threads that have not started
        for warp in self.warps:
            warp.live = (1 << len(warp.threads)) - 1
            warp.waiting = {}
        while self.fresh and not self.failure:
            (self.idle.pop() if self.idle else greenlet(_work)).switch()  # from here, or their stacks would nest
        if self.failure is None and any(warp.live for warp in self.warps):
            self.failure = self.deadlock()
        if self.failure is not None:
            error = self.explain(*self.failure)
            self.abandon()
            raise error

    def resume(self, threads: list):
        """These have what they waited for."""
        if self.ahead:
            self.ready.extendleft(reversed(threads))
        else:
            self.ready.extend(threads)

    def abandon(self):
        """Unwind the greenlets of threads that wait."""
        started = set(self.threads) - set(self.fresh)
        for one in {thread.greenlet for thread in started} - set(self.idle):
            one.throw()

    def exit(self, thread):
        """Who has exited is waited for no longer."""
        warp = thread.warp
        warp.live &= ~(1 << thread.lane)
        for key, values in list(warp.waiting.items()):
            if len(values) == (key[1] & warp.live).bit_count():
                del warp.waiting[key]
                self.resume([warp.threads[lane] for lane in values])

    def deadlock(self):
        """Nobody can go on. The one to blame: a lane whose warp does not come, else a thread at a barrier."""
        live = [thread for thread in self.threads if thread.warp.live >> thread.lane & 1]
        for thread in live:
            if thread.waits[0] == "warp":
                _, operation, mask = thread.waits
                arrived = thread.warp.waiting[operation, mask]
                missing = next(
                    t for t in live if t.warp is thread.warp and mask >> t.lane & 1 and t.lane not in arrived
                )
                if missing.waits[:2] == ("warp", operation):
                    what = f"lanes of a warp name different masks: {mask:#x} here, {missing.waits[2]:#x} in lane"
                    return thread, SimulatorError(f"{operation}: {what} {missing.lane} ({self.place(missing)})")
                return thread, SimulatorError(
                    f"{operation} with mask {mask:#x} waits for lane {missing.lane}, which {self.fate(missing)}"
                )
        thread = next((thread for thread in live if thread.waits[0] == "barrier"), live[0])
        kind, barrier, count = thread.waits
        if kind == "sleep":
            return thread, SimulatorError(f"{barrier} waits for what does not come")
        arrived = self.barriers[barrier, count]
        missing = next((t for t in self.threads if t not in arrived), None)
        return thread, SimulatorError(
            f"{barrier} is reached by {len(arrived)} of {count} threads"
            + (f": thread {missing!r} {self.fate(missing)}" if missing else "")
        )

    def is_live(self, thread) -> bool:
        return bool(thread.warp.live >> thread.lane & 1)

    def fate(self, thread) -> str:
        return f"waits in {thread.waits[1]} ({self.place(thread)})" if self.is_live(thread) else "has exited"

    def place(self, thread) -> str:
        """Where a waiting thread stands, as file:line."""
        frame, lines = thread.greenlet.gr_frame, []
        while frame is not None and not (lines and lines[-1][0] is self.kernel.__code__):
            if frame.f_code.co_filename not in OURS:
                lines.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return self.told(lines)

    def told(self, lines: list[tuple]) -> str:
        """Of the lines (code, number) that a thread stands in, the innermost first: that one, and the kernel's own."""
        place, *rest = [f"{_short(code.co_filename)}:{number}" for code, number in lines]
        return f"{place}, called in {rest[-1]}" if rest and lines[-1][0] is self.kernel.__code__ else place

    def explain(self, thread, error) -> BaseException:
        """The error with kernel, source line, block and thread."""
        if not isinstance(error, Exception):
            return error  # Ctrl-C
        lines = []
        trace, of = error.__traceback__, ""
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_code.co_filename not in OURS:
                lines.insert(0, (frame.f_code, trace.tb_lineno))
                theirs = frame.f_locals
            elif isinstance(error, IndexError):
                array = frame.f_locals.get("self", frame.f_locals.get("array"))
                if isinstance(array, (*ARRAYS, LocalArray)):
                    of = next((f" of {name}" for name, value in theirs.items() if value is array), of)
            trace = trace.tb_next
        code = self.kernel.__code__
        if error.__traceback__ is None:
            place = self.place(thread)
        else:
            place = self.told(lines or [(code, code.co_firstlineno)])
        kind = "" if isinstance(error, SimulatorError) else f"{type(error).__name__}: "
        where = f"{self.kernel.__name__}, {place}, block {blockIdx!r}, thread {thread!r}"
        located = SimulatorError(f"{kind}{' '.join(str(error).splitlines())}{of} [{where}]")
        located.__cause__ = None if kind == "" or isinstance(error, IndexError) else error
        located.__suppress_context__ = True
        return located


OURS = {os.path.join(os.path.dirname(__file__), name) for name in ("simulator.py", "intrinsics.py", "tma.py")}


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return (path if relative.startswith("..") else relative).replace("\n", "\\n")


threadIdx = Thread(0, 0, 0)  # the one whose turn it is
blockIdx, blockDim, gridDim = Dim3(0, 0, 0), Dim3(1), Dim3(1)
laneid = 0
_launch = None  # the Launch under way


def _work():
    """A greenlet's life: a thread after the other. Those that never wait all run in the first one."""
    global threadIdx, laneid
    me = getcurrent()
    np.seterr(all="ignore")  # for this greenlet alone
    while True:
        launch = _launch
        if launch.ready or launch.failure or not launch.fresh:
            launch.idle.append(me)
            (launch.ready.popleft().greenlet if launch.ready and not launch.failure else launch.hub).switch()
            continue
        thread = launch.fresh.popleft()
        thread.greenlet = me
        threadIdx, laneid = thread, thread.lane
        try:
            launch.kernel(*launch.args)
            launch.exit(thread)
        except GreenletExit:
            raise
        except BaseException as error:
            launch.failure = (thread, error)


def _wait(thread, kind, operation, number):
    """Let others run until one of them puts this thread among the ready."""
    global threadIdx, laneid
    thread.waits = (kind, operation, number)
    ready = _launch.ready
    (ready.popleft().greenlet if ready else _launch.hub).switch()
    threadIdx, laneid = thread, thread.lane


def exchange(operation: str, mask: int, value) -> dict:
    """What every warp collective is built of: wait for all lanes of the mask that have not exited, and give each the
    others' values, {lane: value}. They meet who name the same operation and the same mask, wherever in the source."""
    thread, lane = threadIdx, laneid
    mask &= FULL_MASK
    if not mask >> lane & 1:
        raise SimulatorError(f"{operation}: lane {lane} calls it, but its mask {mask:#x} leaves that lane out")
    warp = thread.warp
    waiting = warp.waiting
    key = operation, mask
    if key in waiting:
        values = waiting[key]
    else:
        values = waiting[key] = {}
    values[lane] = value
    if len(values) == (mask & warp.live).bit_count():
        del waiting[key]
        threads = warp.threads
        _launch.resume([threads[other] for other in values if other != lane])
    else:
        _wait(thread, "warp", operation, mask)
    return values


def barrier(name: str, count: int, value=None) -> dict:
    """Wait until `count` threads of the block have come to the barrier of this name: {thread: value}."""
    thread, barriers = threadIdx, _launch.barriers
    key = name, count
    if key in barriers:
        arrived = barriers[key]
    else:
        arrived = barriers[key] = {}
    arrived[thread] = value
    if len(arrived) == count:
        del barriers[key]
        _launch.resume([other for other in arrived if other is not thread])
    else:
        _wait(thread, "barrier", name, count)
    return arrived


def sleep(operation: str) -> None:
    """Wait until another thread wakes this one."""
    _wait(threadIdx, "sleep", operation, 0)


def wake(threads) -> None:
    _launch.resume(threads)


def running() -> Thread:
    return threadIdx


def block_state() -> dict:
    """What lives as long as a block, for intrinsics to keep things in."""
    return _launch.state


def is_shared(array: Array) -> bool:
    """Whether an array, on which flat_at was called, lies in the shared memory of the block."""
    address = array.flat[1]
    return any(start <= address < end for start, end in _launch.shared_ranges)


# Launching ------------------------------------------------------------------------------------------------------------


def jit(function=None, device=False, **options):
    """numba.cuda.jit. The options steer a compiler, and mean nothing here."""
    if not callable(function):  # @jit(...), perhaps with a signature
        return lambda function: jit(function, device=device, **options)
    _use_float32_math(function)
    return function if device else Kernel(function)


class Kernel:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.py_func = function

    def __getitem__(self, configuration):
        grid, block, _stream, dynamic_bytes = (*configuration, 0, 0)[:4]
        return functools.partial(self._launch, _dim3(grid), _dim3(block), dynamic_bytes)

    def __call__(self, *args):
        raise SimulatorError(f"{self.__name__}: say how many blocks and threads, {self.__name__}[blocks, threads](...)")

    def _launch(self, grid, block, dynamic_bytes, *args):
        global _launch
        if _launch is not None:
            raise SimulatorError(f"{self.__name__}: a kernel cannot launch a kernel")
        self._check_launch(grid, block, dynamic_bytes)
        gridDim.x, gridDim.y, gridDim.z = grid.x, grid.y, grid.z
        blockDim.x, blockDim.y, blockDim.z = block.x, block.y, block.z
        launch = _launch = Launch(self.py_func, args, block, dynamic_bytes)
        try:
            for blockIdx.z, blockIdx.y, blockIdx.x in itertools.product(range(grid.z), range(grid.y), range(grid.x)):
                launch.run_block()
        finally:
            _launch = None

    def _check_launch(self, grid, block, dynamic_bytes):
        """CUDA C++ Programming Guide, Technical Specifications per Compute Capability."""
        threads = block.x * block.y * block.z
        if not 1 <= threads <= 1024 or block.z > 64:
            raise SimulatorError(f"{self.__name__}: {block!r} threads a block, a GPU takes 1 to 1024 (64 in z)")
        if not (1 <= grid.x < 2**31 and 1 <= grid.y < 2**16 and 1 <= grid.z < 2**16):
            raise SimulatorError(f"{self.__name__}: {grid!r} blocks, a GPU takes 1 to 2147483647 (65535 in y and z)")
        if dynamic_bytes > SHARED_LIMIT:
            raise SimulatorError(
                f"{self.__name__}: {dynamic_bytes} bytes of shared memory, a block gets at most {SHARED_LIMIT}"
            )


def _dim3(size) -> Dim3:
    return Dim3(*size) if isinstance(size, tuple) else Dim3(size)


def _use_float32_math(function):
    """Let the function's module see our `math` in place of Python's."""
    names = function.__globals__
    for name in function.__code__.co_names:
        if names.get(name) is math:
            names[name] = float32_math


def _ieee(name):
    """A function of Python's math that gives float32 for float32, else float64, and infinity or NaN where Python raises."""
    function, vectorized = getattr(math, name), getattr(np, name, None)

    @functools.wraps(function)
    def call(x, *rest):
        try:
            y = function(x, *rest)
        except (ValueError, OverflowError):
            y = vectorized(x, *rest)
        single = x.__class__ is np.float32 and (not rest or rest[0].__class__ is np.float32)
        return np.float32(y) if single else np.float64(y)

    return call


float32_math = SimpleNamespace(**vars(math))
for _name in (
    "acos acosh asin asinh atan atan2 atanh copysign cos cosh erf erfc exp expm1 fabs fmod hypot log log10 log1p "
    "log2 pow sin sinh sqrt tan tanh"
).split():
    setattr(float32_math, _name, _ieee(_name))


# What a kernel calls --------------------------------------------------------------------------------------------------


def grid(ndim: int):
    x = blockIdx.x * blockDim.x + threadIdx.x
    if ndim == 1:
        return x
    y = blockIdx.y * blockDim.y + threadIdx.y
    return (x, y) if ndim == 2 else (x, y, blockIdx.z * blockDim.z + threadIdx.z)


def gridsize(ndim: int):
    x = gridDim.x * blockDim.x
    if ndim == 1:
        return x
    y = gridDim.y * blockDim.y
    return (x, y) if ndim == 2 else (x, y, gridDim.z * blockDim.z)


def syncthreads():
    """All threads of the block. One that has exited is missed: since Volta a GPU goes on without it, but the programming
    guide allows a barrier in divergent code only where all threads take the same way."""
    barrier("syncthreads", len(_launch.threads))


def syncthreads_count(predicate) -> int:
    return sum(map(bool, barrier("syncthreads_count", len(_launch.threads), predicate).values()))


def syncthreads_and(predicate) -> int:
    return int(all(barrier("syncthreads_and", len(_launch.threads), predicate).values()))


def syncthreads_or(predicate) -> int:
    return int(any(barrier("syncthreads_or", len(_launch.threads), predicate).values()))


def threadfence():
    """Memory is in order here, always."""


threadfence_block = threadfence_system = threadfence


def nanosleep(ns):
    """Time means nothing here."""


def syncwarp(mask=FULL_MASK):
    exchange("syncwarp", mask, None)


def shuffle(operation: str, mask: int, value, source: int, first: int = 0, last: int = 31):
    """The value that lane `source` brings, if that lies in first..last, else one's own (PTX ISA, shfl.sync). A lane that
    the mask leaves out brings something undefined: poison."""
    lanes = exchange(operation, mask, value)
    if not first <= source <= last:
        return value
    if source in lanes:
        return lanes[source]
    if mask >> source & 1:
        raise SimulatorError(
            f"{operation}: lane {laneid} reads lane {source}, which has exited (or the block has no such thread)"
        )
    return POISON if isinstance(value, int) else type(value)("nan")


# The hardware looks at the low five bits of a shuffle's step only.


def shfl_sync(mask, value, src_lane):
    return shuffle("shfl_sync", mask, value, src_lane & 31)


def shfl_up_sync(mask, value, delta):
    return shuffle("shfl_up_sync", mask, value, laneid - (delta & 31))


def shfl_down_sync(mask, value, delta):
    return shuffle("shfl_down_sync", mask, value, laneid + (delta & 31))


def shfl_xor_sync(mask, value, lane_mask):
    return shuffle("shfl_xor_sync", mask, value, laneid ^ (lane_mask & 31))


def all_sync(mask, predicate) -> bool:
    return all(exchange("all_sync", mask, predicate).values())


def any_sync(mask, predicate) -> bool:
    return any(exchange("any_sync", mask, predicate).values())


def eq_sync(mask, predicate) -> bool:
    return len(set(map(bool, exchange("eq_sync", mask, predicate).values()))) == 1


def _lanes_where(lanes: dict, condition) -> int:
    """Numba types such masks as int32: bit 31 is the sign."""
    return int32(sum(1 << lane for lane, value in lanes.items() if condition(value)))


def ballot_sync(mask, predicate) -> int:
    return _lanes_where(exchange("ballot_sync", mask, predicate), bool)


def _bits(value):
    return value.tobytes() if isinstance(value, np.generic) else value


def match_any_sync(mask, value) -> int:
    return _lanes_where(exchange("match_any_sync", mask, _bits(value)), lambda other: other == _bits(value))


def match_all_sync(mask, value):
    lanes = exchange("match_all_sync", mask, _bits(value))
    agreed = len(set(lanes.values())) == 1
    return (_lanes_where(lanes, lambda other: True) if agreed else 0), agreed


def activemask() -> int:
    """Who runs together is the hardware's choice. Here: all lanes that have not exited by now."""
    return threadIdx.warp.live


def lanemask_lt() -> int:
    return (1 << laneid) - 1


def _width(x: int) -> int:
    """Integers have lost their type here: 32 bits where they fit."""
    return 32 if -(2**31) <= x < 2**32 else 64


def popc(x) -> int:
    return (x & (1 << _width(x)) - 1).bit_count()


def clz(x) -> int:
    return _width(x) - (x & (1 << _width(x)) - 1).bit_length()


def ffs(x) -> int:
    """The position of the lowest bit that is set, counted from 1; 0 if none is."""
    return (x & -x).bit_length()


def brev(x) -> int:
    return int(f"{x & (1 << _width(x)) - 1:0{_width(x)}b}"[::-1], 2)


def selp(condition, a, b):
    return a if condition else b


def fma(a, b, c):
    """Rounded once: the product of two float32 is exact in float64."""
    if isinstance(a, np.float32):
        return np.float32(float(a) * float(b) + float(c))
    return a * b + c


def cbrt(x):
    return np.cbrt(x)


def _atomic(new):
    def operation(array, index, value):
        old = array[index]
        array[index] = new(old, value)
        return old

    return operation


def _compare_and_swap(array, index, old, value):
    found = array[index]
    if found == old:
        array[index] = value
    return found


# array[index] becomes what the function says, and the old value is returned. Nothing runs meanwhile.
atomic = SimpleNamespace(
    add=_atomic(lambda old, value: old + value),
    sub=_atomic(lambda old, value: old - value),
    max=_atomic(lambda old, value: value if value > old else old),
    min=_atomic(lambda old, value: value if value < old else old),
    and_=_atomic(lambda old, value: old & value),
    or_=_atomic(lambda old, value: old | value),
    xor=_atomic(lambda old, value: old ^ value),
    inc=_atomic(lambda old, value: 0 if old >= value else old + 1),
    dec=_atomic(lambda old, value: value if old == 0 or old > value else old - 1),
    exch=_atomic(lambda old, value: value),
    cas=_compare_and_swap,
    compare_and_swap=lambda array, old, value: _compare_and_swap(array, 0, old, value),
)

cuda = sys.modules[__name__]


def __getattr__(name):
    raise AttributeError(f"the simulator has no cuda.{name}")
