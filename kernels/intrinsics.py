"""Instructions that Numba does not offer, each beside what it means.

Every function here has two lives. Its decorator holds the PTX that a GPU runs; its body says the same in Python, for the
simulator. In the PTX `$0, $1, ...` are first the results, then the arguments, as in LLVM's inline assembly. Section names
are those of NVIDIA's PTX ISA.

A pair of arguments `array, i` names an element: the i-th, counted flat, of an array with any number of dimensions, which
must be C-contiguous. Where 8 or 16 bytes are moved at once the element must stand at a multiple of 8 or 16: global arrays
start at one, shared arrays only if they are declared with `alignment=16`.
"""

import functools
import inspect
import math
import time

import numpy as np

from kernels.target import SIMULATE

if SIMULATE:
    from kernels import simulator
    from kernels.simulator import float32, int32, int64, uint32, uint64
else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.core.errors import RequireLiteralValue, TypingError
    from numba.cuda.extending import intrinsic
    from numba.cuda.types import float32, int32, int64, uint32, uint64

__all__ = [
    "atomic_add4", "bar_sync", "cp_async4", "cp_async4_zfill", "cp_async16", "cp_async16_zfill", "cp_async_commit",
    "cp_async_wait", "exp2_approx", "globaltimer", "ldmatrix_x2", "ldmatrix_x4", "load2", "load4", "load4_readonly",
    "load4_streaming", "log2_approx", "mma_tf32", "rcp_approx", "rsqrt_approx", "shfl_down_width", "shfl_up_width",
    "shfl_width", "shfl_xor_width", "store2", "store4", "store4_streaming", "tanh_approx", "to_tf32",
]  # fmt: skip


# How an intrinsic is made ---------------------------------------------------------------------------------------------

GLOBAL, SHARED, LITERAL, TF32 = "global", "shared", "literal", "tf32"  # what an argument may be, beside a number


def ptx(text: str, returns=None, takes=(), pure: bool = False, collective: bool = False):
    """Make an intrinsic of the function below: on a GPU it is this PTX, in the simulator the function itself.

    returns: the result's type (float32, ...), several in a tuple, or None.
    takes: for each argument its type; Numba converts what it is given. GLOBAL and SHARED stand for an element, and so for
    two arguments of the function, `array, i`; the instruction gets its address (32 bits wide in shared memory).
    LITERAL is an integer known when the kernel is compiled. TF32 is a float32 that PTX wants in a register without type.
    pure: the results depend on nothing but the arguments, so that the compiler may move or drop the instruction.
    collective: the lanes of a warp execute it together, so that the compiler must not move it into a branch.
    """
    results = returns if isinstance(returns, tuple) else () if returns is None else (returns,)

    def decorate(twin):
        if SIMULATE:
            return twin

        def define(_, *given):
            given, accepted = list(given), []
            for kind in takes:
                argument = given.pop(0)
                if kind in (GLOBAL, SHARED):
                    accepted += [_contiguous(twin.__name__, argument), int64]
                    given.pop(0)
                elif kind == LITERAL:
                    if not isinstance(argument, types.IntegerLiteral):
                        raise RequireLiteralValue(
                            f"{twin.__name__} takes a literal integer, or a constant of the module"
                        )
                    accepted.append(argument)
                else:
                    accepted.append(_number(kind))
            numbers = [_number(kind) for kind in results]
            result = types.Tuple(numbers) if len(numbers) > 1 else numbers[0] if numbers else types.none
            return result(*accepted), generate

        def generate(context, builder, signature, args):
            args, operands = list(zip(signature.args, args, strict=True)), []
            for kind in takes:
                type_, value = args.pop(0)
                if kind in (GLOBAL, SHARED):
                    space, width = (1, 64) if kind == GLOBAL else (3, 32)
                    pointer = _pointer(context, builder, type_, value, args.pop(0)[1], space)
                    value = builder.ptrtoint(pointer, ir.IntType(width))
                elif kind == LITERAL:
                    value = ir.Constant(ir.IntType(32), type_.literal_value)
                elif kind == TF32:
                    value = builder.bitcast(value, ir.IntType(32))
                operands.append(value)
            registers = [ir.IntType(32) if kind == TF32 else context.get_value_type(kind) for kind in results]
            result = ir.LiteralStructType(registers) if len(registers) > 1 else [*registers, ir.VoidType()][0]
            constraints = ["=" + _CONSTRAINT[kind] for kind in results] + [_CONSTRAINT[kind] for kind in takes]
            value = builder.call(
                ir.InlineAsm(
                    ir.FunctionType(result, [operand.type for operand in operands]),
                    text,
                    ",".join(constraints if pure else [*constraints, "~{memory}"]),
                    side_effect=not pure,
                ),
                operands,
                attrs=("readnone", "nounwind") * pure + ("convergent",) * collective,
            )
            values = [builder.extract_value(value, k) for k in range(len(results))] if len(results) > 1 else [value]
            for k, kind in enumerate(results):
                if kind == TF32:
                    values[k] = builder.bitcast(values[k], ir.FloatType())
            if len(results) > 1:
                return context.make_tuple(builder, signature.return_type, values)
            return values[0] if results else context.get_dummy_value()

        return _intrinsic(twin, define)

    return decorate


def vector_load(width: int):
    """Make an intrinsic that loads `width` neighbouring elements at once. LLVM knows such loads without assembly, and
    whether the memory is global or shared."""

    def decorate(twin):
        if SIMULATE:
            return twin

        def define(_, array, i):
            return types.UniTuple(_contiguous(twin.__name__, array).dtype, width)(array, int64), generate

        def generate(context, builder, signature, args):
            element = context.get_data_type(signature.args[0].dtype)
            pointer = _pointer(context, builder, signature.args[0], *args)
            pointer = builder.bitcast(pointer, ir.VectorType(element, width).as_pointer())
            loaded = builder.load(pointer, align=width * signature.args[0].dtype.bitwidth // 8)
            parts = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), k)) for k in range(width)]
            return context.make_tuple(builder, signature.return_type, parts)

        return _intrinsic(twin, define)

    return decorate


def vector_store(width: int):
    """Make an intrinsic that stores `width` neighbouring elements at once."""

    def decorate(twin):
        if SIMULATE:
            return twin

        def define(_, array, i, *values):
            dtype = _contiguous(twin.__name__, array).dtype
            return types.none(array, int64, *[dtype] * width), generate

        def generate(context, builder, signature, args):
            array, i, *values = args
            element = context.get_data_type(signature.args[0].dtype)
            packed = ir.Constant(ir.VectorType(element, width), ir.Undefined)
            for k, value in enumerate(values):
                packed = builder.insert_element(packed, value, ir.Constant(ir.IntType(32), k))
            pointer = _pointer(context, builder, signature.args[0], array, i)
            pointer = builder.bitcast(pointer, packed.type.as_pointer())
            builder.store(packed, pointer, align=width * signature.args[0].dtype.bitwidth // 8)
            return context.get_dummy_value()

        return _intrinsic(twin, define)

    return decorate


if not SIMULATE:  # the letters of LLVM's inline assembly for PTX's registers
    _CONSTRAINT = {float32: "f", int32: "r", uint32: "r", int64: "l", uint64: "l"}
    _CONSTRAINT |= {GLOBAL: "l", SHARED: "r", LITERAL: "n", TF32: "r"}


def _number(kind):
    return float32 if kind == TF32 else kind


def _intrinsic(twin, define):
    """Numba reads an intrinsic's arguments off its definition's signature, so that must be the twin's."""
    parameters = inspect.signature(twin).parameters.values()
    context = inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    define.__signature__ = inspect.Signature([context, *parameters])
    define.__name__ = define.__qualname__ = twin.__name__
    define.__doc__ = twin.__doc__
    return intrinsic(define)


def _contiguous(name: str, array):
    if not isinstance(array, types.Array) or array.layout != "C":
        raise TypingError(f"{name} takes a C-contiguous array, not {array}")
    return array


def _pointer(context, builder, array_type, array, i, space=0):
    """The address of the i-th element; in one of the address spaces of NVVM: 0 any, 1 global, 3 shared."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.gep(data, [i])
    return builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space)) if space else pointer


# Loads and stores of several elements ---------------------------------------------------------------------------------


@vector_load(2)
def load2(array, i):
    """Two neighbouring elements, in one 8-byte load of 4-byte elements. (PTX ISA, ld: .v2)"""
    flat = array.flat_at(i, 2)
    return flat[i], flat[i + 1]


@vector_load(4)
def load4(array, i):
    """Four neighbouring elements, in one 16-byte load of 4-byte elements. (PTX ISA, ld: .v4)"""
    flat = array.flat_at(i, 4)
    return flat[i], flat[i + 1], flat[i + 2], flat[i + 3]


@vector_store(2)
def store2(array, i, a, b):
    """Two neighbouring elements, in one 8-byte store. (PTX ISA, st: .v2)"""
    flat = array.flat_at(i, 2)
    flat[i], flat[i + 1] = a, b


@vector_store(4)
def store4(array, i, a, b, c, d):
    """Four neighbouring elements, in one 16-byte store. (PTX ISA, st: .v4)"""
    flat = array.flat_at(i, 4)
    flat[i], flat[i + 1], flat[i + 2], flat[i + 3] = a, b, c, d


@ptx("ld.global.cs.v4.f32 {$0, $1, $2, $3}, [$4];", returns=(float32,) * 4, takes=(GLOBAL,))
def load4_streaming(array, i):
    """load4 of float32 in global memory that is not read again: the cache gives its place up first, and what will be read
    again stays. (PTX ISA, Cache Operators: .cs, cache streaming)"""
    return load4(array, i)


@ptx("st.global.cs.v4.f32 [$0], {$1, $2, $3, $4};", takes=(GLOBAL, float32, float32, float32, float32))
def store4_streaming(array, i, a, b, c, d):
    """store4 of float32 to global memory that is not read again soon. (PTX ISA, Cache Operators: .cs)"""
    store4(array, i, a, b, c, d)


@ptx("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", returns=(float32,) * 4, takes=(GLOBAL,), pure=True)
def load4_readonly(array, i):
    """load4 of float32 in global memory that nobody writes while the kernel runs, so that the compiler may move the load
    past any store. (PTX ISA, ld.global.nc)"""
    return load4(array, i)


@ptx("red.global.add.v4.f32 [$0], {$1, $2, $3, $4};", takes=(GLOBAL, float32, float32, float32, float32))
def atomic_add4(array, i, a, b, c, d):
    """Add to four neighbouring float32, each atomically; compute capability 9.0. (PTX ISA, red: .vec_32_bit)"""
    array.flat_at(i, 4)[i : i + 4] += np.array([a, b, c, d], np.float32)


# Approximate mathematics ----------------------------------------------------------------------------------------------


@ptx("tanh.approx.f32 $0, $1;", returns=float32, takes=(float32,), pure=True)
def tanh_approx(x):
    """tanh(x), relative error at most 2^-11; compute capability 7.5. (PTX ISA, tanh) The simulator's is exact."""
    return float32(math.tanh(x))


@ptx("ex2.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,), pure=True)
def exp2_approx(x):
    """2**x, error at most 2 ulp, subnormals become 0. (PTX ISA, ex2) The simulator's is exact."""
    return np.exp2(float32(x))


@ptx("lg2.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,), pure=True)
def log2_approx(x):
    """log2(x), absolute error at most 2^-22. (PTX ISA, lg2) The simulator's is exact."""
    return np.log2(float32(x))


@ptx("rcp.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,), pure=True)
def rcp_approx(x):
    """1 / x, error at most 1 ulp. (PTX ISA, rcp.approx.ftz) The simulator's is exact."""
    return float32(1) / float32(x)


@ptx("rsqrt.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,), pure=True)
def rsqrt_approx(x):
    """1 / sqrt(x), relative error at most 2^-22.9. (PTX ISA, rsqrt) The simulator's is exact."""
    return np.float32(1 / np.sqrt(np.float64(x)))


# Shuffles in segments of a warp ---------------------------------------------------------------------------------------
# Numba's shuffles span the warp. These stay within segments of `width` lanes (2, 4, 8 or 16), as CUDA C++'s do: its
# argument c holds 32 - width in bits 8 to 12 and the clamp below. (PTX ISA, shfl.sync)

_SEGMENT = "{.reg .b32 c; sub.s32 c, 32, $4; shl.b32 c, c, 8; %s shfl.sync.%s.b32 $0, $2, $3, c, $1;}"


@ptx(_SEGMENT % ("or.b32 c, c, 31;", "idx"), returns=float32, takes=(uint32, float32, int32, int32), collective=True)
def shfl_width(mask, value, src_lane, width):
    """The value of lane src_lane (modulo width) of one's own segment."""
    first = simulator.laneid & -width
    return simulator.shuffle("shfl_width", mask, value, first | src_lane & (width - 1))


@ptx(_SEGMENT % ("", "up"), returns=float32, takes=(uint32, float32, int32, int32), collective=True)
def shfl_up_width(mask, value, delta, width):
    """The value of the lane `delta` below, in one's own segment; else one's own value."""
    lane = simulator.laneid
    return simulator.shuffle("shfl_up_width", mask, value, lane - (delta & 31), first=lane & -width)


@ptx(_SEGMENT % ("or.b32 c, c, 31;", "down"), returns=float32, takes=(uint32, float32, int32, int32), collective=True)
def shfl_down_width(mask, value, delta, width):
    """The value of the lane `delta` above, in one's own segment; else one's own value."""
    lane = simulator.laneid
    return simulator.shuffle("shfl_down_width", mask, value, lane + (delta & 31), last=lane | width - 1)


@ptx(_SEGMENT % ("or.b32 c, c, 31;", "bfly"), returns=float32, takes=(uint32, float32, int32, int32), collective=True)
def shfl_xor_width(mask, value, lane_mask, width):
    """The value of lane (own ^ lane_mask), if that is no later segment's; else one's own value."""
    lane = simulator.laneid
    return simulator.shuffle("shfl_xor_width", mask, value, lane ^ lane_mask & 31, last=lane | width - 1)


# Tensor cores ---------------------------------------------------------------------------------------------------------


@ptx("cvt.rna.tf32.f32 $0, $1;", returns=TF32, takes=(float32,), pure=True)
def to_tf32(x):
    """x rounded to TF32, 10 bits of mantissa, ties away from zero; compute capability 8.0. (PTX ISA, cvt: .rna.tf32)"""
    bits = int(np.float32(x).view(np.uint32))
    if bits & 0x7F800000 != 0x7F800000:  # not infinity, not NaN
        bits = bits + 0x1000 & 0xFFFFE000
    return np.uint32(bits).view(np.float32)


MMA_TF32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{{}}}, {{{}}}, {{{}}}, {{{}}};"  # d, a, b, c


@ptx(
    MMA_TF32.format("$0, $1, $2, $3", "$8, $9, $10, $11", "$12, $13", "$4, $5, $6, $7"),
    returns=(float32,) * 4, takes=(float32,) * 4 + (TF32,) * 6, pure=True, collective=True,
)  # fmt: skip
def mma_tf32(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1):
    """d = a @ b + c by the 32 lanes of a warp together: a 16 x 8, b 8 x 8, c and d 16 x 8; compute capability 8.0.

    Lane 4 g + t holds (PTX ISA, Matrix Fragments for mma.m16n8k8)
        a0 = a[g, t]      a1 = a[g + 8, t]     a2 = a[g, t + 4]      a3 = a[g + 8, t + 4]
        b0 = b[t, g]      b1 = b[t + 4, g]
        c0 = c[g, 2 t]    c1 = c[g, 2 t + 1]   c2 = c[g + 8, 2 t]    c3 = c[g + 8, 2 t + 1]    and d as c.
    The low 13 bits of a and b are ignored: round with to_tf32 first, or they are cut off.
    """
    lanes = _whole_warp("mma_tf32", (c0, c1, c2, c3, a0, a1, a2, a3, b0, b1))
    if "d" not in lanes:  # the first lane to come here computes for all
        lanes["d"] = _mma(np.array([lanes[lane] for lane in range(32)], np.float32))
    d, lane = lanes["d"], simulator.laneid
    return d[lane, 0], d[lane, 1], d[lane, 2], d[lane, 3]


def _mma(values: np.ndarray) -> np.ndarray:
    """values (32, 10): what the lanes bring; returns (32, 4): what they get."""
    (of_a, of_b, of_c), of_d = _fragments()
    c = values[of_c]
    values = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return (values[of_a] @ values[of_b] + c).astype(np.float32)[of_d]


@functools.cache
def _fragments():
    """For each element of a, b and c who holds it, (lane, which of its arguments); for each lane its elements of d."""
    row, k = np.indices((16, 8))
    a = 4 * (row % 8) + k % 4, 4 + row // 8 + 2 * (k // 4)
    k, column = np.indices((8, 8))
    b = 4 * column + k % 4, 8 + k // 4
    row, column = np.indices((16, 8))
    c = 4 * (row % 8) + column // 2, 2 * (row // 8) + column % 2
    lane, i = np.indices((32, 4))
    return (a, b, c), (lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2)


def _whole_warp(name: str, value) -> dict:
    """What all 32 lanes of the warp bring, {lane: value}."""
    lanes = simulator.exchange(name, 0xFFFFFFFF, value)
    if len(lanes) < 32:
        raise simulator.SimulatorError(f"{name} needs all 32 lanes of a warp, some have exited or never were")
    return lanes


@ptx(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
    returns=(float32,) * 4,
    takes=(SHARED,),
    collective=True,
)
def ldmatrix_x4(array, i):
    """Four 8 x 4 matrices of float32 from shared memory, one element of each to every lane; compute capability 7.5.

    Lane 8 m + r names the first element of row r of matrix m: four float32, 16-byte aligned. Lane 4 r + k receives
    element k of row r of each matrix. (PTX ISA, ldmatrix. It speaks of 8 x 8 matrices of 16-bit elements; a row is 16
    bytes, and a lane's two neighbours are one float32.)
    """
    return _ldmatrix("ldmatrix_x4", array, i, 4)


@ptx(
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];", returns=(float32,) * 2, takes=(SHARED,), collective=True
)
def ldmatrix_x2(array, i):
    """Two matrices, as ldmatrix_x4. Lanes 0 to 15 name the rows; what the others name is ignored."""
    return _ldmatrix("ldmatrix_x2", array, i, 2)


def _ldmatrix(name, array, i, count):
    row = _flat_shared(name, array, i, 4) if simulator.laneid < 8 * count else None
    lanes = _whole_warp(name, (row, i))
    r, k = divmod(simulator.laneid, 4)
    rows = [lanes[8 * m + r] for m in range(count)]
    return tuple([flat[i + k] for flat, i in rows])


def _flat_shared(name, array, i, count):
    flat = array.flat_at(i, count)
    if not simulator.is_shared(array):
        raise simulator.SimulatorError(f"{name} takes an array in shared memory first")
    return flat


# Copies from global to shared memory that run on their own ------------------------------------------------------------
# Compute capability 8.0. A thread starts copies, binds those since the last commit into a group, and waits until at most
# so many of its groups are still under way. What it copied it then sees itself; the others do after a barrier.
# (PTX ISA, Data Movement and Conversion Instructions: cp.async)


@ptx("cp.async.cg.shared.global [$0], [$1], 16;", takes=(SHARED, GLOBAL))
def cp_async16(shared, i, source, j):
    """Start to copy 16 bytes, shared[i : i + 4] = source[j : j + 4], past the L1 cache. Both 16-byte aligned."""
    _start_copy(shared, i, source, j, 4)


_ZFILL = "{.reg .pred p; .reg .b32 n; setp.ne.b32 p, $2, 0; selp.b32 n, %d, 0, p; cp.async.%s.shared.global [$0], [$1], %d, n;}"


@ptx(_ZFILL % (16, "cg", 16), takes=(SHARED, GLOBAL, int32))
def cp_async16_zfill(shared, i, source, j, valid):
    """cp_async16 where `valid`; elsewhere 16 bytes of zeros, and source[j] is not touched, so it need not exist."""
    _start_copy(shared, i, source, j, 4, valid)


@ptx("cp.async.ca.shared.global [$0], [$1], 4;", takes=(SHARED, GLOBAL))
def cp_async4(shared, i, source, j):
    """Start to copy 4 bytes, shared[i] = source[j], where 16 are not aligned."""
    _start_copy(shared, i, source, j, 1)


@ptx(_ZFILL % (4, "ca", 4), takes=(SHARED, GLOBAL, int32))
def cp_async4_zfill(shared, i, source, j, valid):
    """cp_async4 where `valid`; elsewhere 4 bytes of zeros, and source[j] is not touched."""
    _start_copy(shared, i, source, j, 1, valid)


def _start_copy(shared, i, source, j, count, valid=True):
    target = _flat_shared("cp_async", shared, i, count)[i : i + count]
    _copies()[-1].append((target, source.flat_at(j, count)[j : j + count] if valid else 0))


def _copies() -> list:
    """A thread's groups of copies that have not arrived, the last one still open."""
    state, thread = simulator.block_state(), simulator.running()
    if thread not in state:
        state[thread] = [[]]
    return state[thread]


@ptx("cp.async.commit_group;")
def cp_async_commit():
    """Bind this thread's copies since the last commit into a group (an empty one, if there are none)."""
    _copies().append([])


@ptx("cp.async.wait_group $0;", takes=(LITERAL,))
def cp_async_wait(n):
    """Wait until at most n of this thread's groups, the youngest, are still under way. n: a literal."""
    groups = _copies()
    while len(groups) - 1 > n:  # the last one is not committed yet
        for target, source in groups.pop(0):
            target[:] = source


# The rest -------------------------------------------------------------------------------------------------------------


@ptx("bar.sync $0, $1;", takes=(int32, int32), collective=True)
def bar_sync(name, count):
    """A barrier for a part of the block: wait until `count` threads, whole warps, have come to the barrier of this number,
    1 to 15 (0 is syncthreads). (PTX ISA, bar.sync)"""
    if not 1 <= name <= 15 or count % 32 or not 0 < count:
        raise simulator.SimulatorError(f"bar_sync({name}, {count}): a number of 1 to 15, a count of whole warps")
    simulator.barrier(f"bar_sync {name}", count)


@ptx("mov.u64 $0, %globaltimer;", returns=uint64)
def globaltimer():
    """Nanoseconds on a clock that all multiprocessors share. (PTX ISA, Special Registers: %globaltimer)"""
    return time.perf_counter_ns()
