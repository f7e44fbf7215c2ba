"""What a kernel may count on, in the simulator and on a GPU alike, and what the simulator says where a GPU would not.

The facts run wherever TARGET says, so `make test-gpu` holds the hardware to the same truths.
"""

import ast
import inspect
import math
import time
import warnings

import numpy as np
import pytest

from kernels.device import FULL_MASK, SIMULATE, TARGET, cuda, float32, float64, int32, to_device, to_host

if SIMULATE:
    from kernels import reduce
    from kernels.simulator import POISON, SimulatorError

fact = pytest.mark.gpu if TARGET == "gpu" else pytest.mark.skipif(not SIMULATE, reason="nothing runs when compiling")
simulated = pytest.mark.skipif(not SIMULATE, reason="run with LLM_NUMBA_TARGET=simulator")

LANES = np.arange(32)


def run(kernel, grid, block, *args, shared=0):
    """Launch with copies of the arrays, and return these as the kernel left them (one bare, several as a list)."""
    args = [to_device(a) if isinstance(a, np.ndarray) else a for a in args]
    kernel[grid, block, 0, shared](*args)
    arrays = [to_host(a) for a in args if not isinstance(a, (int, float))]
    return arrays[0] if len(arrays) == 1 else arrays


def values(n=32, dtype=np.float32):
    return (np.random.default_rng(0).standard_normal(n) * 100).astype(dtype)


# Threads and blocks ---------------------------------------------------------------------------------------------------


@cuda.jit
def coordinates_kernel(out):
    x, y, z = cuda.grid(3)
    out[z, y, x, 0] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.threadIdx.z
    out[z, y, x, 1] = cuda.blockIdx.x + 10 * cuda.blockIdx.y + 100 * cuda.blockIdx.z
    out[z, y, x, 2] = cuda.laneid
    width, height, depth = cuda.gridsize(3)
    out[z, y, x, 3] = width + 100 * height + 10000 * depth


@fact
def test_every_thread_of_a_three_dimensional_grid_knows_its_place():
    out = run(coordinates_kernel, (2, 3, 2), (4, 2, 5), np.zeros((10, 6, 8, 4), np.int32))
    z, y, x = np.indices((10, 6, 8))
    assert (out[..., 0] == x % 4 + 10 * (y % 2) + 100 * (z % 5)).all()
    assert (out[..., 1] == x // 4 + 10 * (y // 2) + 100 * (z // 5)).all()
    assert (out[..., 2] == (x % 4 + 4 * (y % 2) + 8 * (z % 5)) % 32).all()
    assert (out[..., 3] == 8 + 100 * 6 + 10000 * 10).all()


@cuda.jit
def scale_kernel(out, inp, factor):
    i = cuda.grid(1)
    if i < inp.size:
        out[i] = factor * inp[i]


@fact
def test_a_grid_larger_than_the_array_writes_all_of_it():
    inp = values(1000)
    assert (run(scale_kernel, 8, 128, np.empty_like(inp), inp, 2)[0] == 2 * inp).all()


# Shared and local memory, barriers ------------------------------------------------------------------------------------


@cuda.jit
def reverse_kernel(out, inp):
    a = cuda.shared.array(1024, float32)
    b = cuda.shared.array(1024, float32)
    t = cuda.threadIdx.x
    a[t] = inp[t]
    b[t] = -inp[t]
    cuda.syncthreads()
    out[t] = a[cuda.blockDim.x - 1 - t]
    out[cuda.blockDim.x + t] = b[cuda.blockDim.x - 1 - t]


@fact
@pytest.mark.parametrize("n", [1, 33, 256, 1024])
def test_a_block_shares_one_array_for_each_declaration(n):
    inp = values(n)
    out, _ = run(reverse_kernel, 1, n, np.empty(2 * n, np.float32), inp)
    assert (out == np.concatenate([inp[::-1], -inp[::-1]])).all()


@cuda.jit
def dynamic_kernel(out):
    floats = cuda.shared.array(0, float32)
    ints = cuda.shared.array(0, int32)
    t = cuda.threadIdx.x
    floats[t] = float32(1.0)
    cuda.syncthreads()
    out[t] = ints[cuda.blockDim.x - 1 - t]
    out[0] = floats.size


@fact
def test_dynamic_shared_arrays_are_one_memory_of_the_size_that_the_launch_asked_for():
    out = run(dynamic_kernel, 1, 32, np.zeros(32, np.int32), shared=50 * 4)
    assert (out[1:] == np.float32(1).view(np.int32)).all()
    assert out[0] == 50


@cuda.jit
def local_kernel(out):
    mine = cuda.local.array((2, 3), float32)
    t = cuda.threadIdx.x
    for i in range(2):
        for j in range(3):
            mine[i, j] = t * 10 + 3 * i + j
    cuda.syncthreads()
    for i in range(2):
        for j in range(3):
            out[t, i, j] = mine[i, j]


@fact
def test_a_local_array_is_a_thread_s_own():
    out = run(local_kernel, 1, 40, np.zeros((40, 2, 3), np.float32))
    assert (out == np.arange(40)[:, None, None] * 10 + np.arange(6).reshape(2, 3)).all()


TABLE = np.array([3, 1, 4, 1, 5], np.int32)


@cuda.jit
def constant_kernel(out):
    table = cuda.const.array_like(TABLE)
    t = cuda.threadIdx.x
    out[t] = table[t]


@fact
def test_a_constant_array_holds_what_the_host_s_did():
    assert (run(constant_kernel, 1, 5, np.zeros(5, np.int32)) == TABLE).all()


@cuda.jit
def votes_of_the_block_kernel(out, inp):
    t = cuda.threadIdx.x
    out[0, t] = cuda.syncthreads_count(int32(inp[t] > 0))
    out[1, t] = cuda.syncthreads_and(int32(inp[t] > 0))
    out[2, t] = cuda.syncthreads_or(int32(inp[t] > 0))
    out[3, t] = cuda.syncthreads_and(int32(inp[t] < 1000))
    out[4, t] = cuda.syncthreads_or(int32(inp[t] > 1000))


@fact
def test_barriers_that_count():
    inp = values(70)
    out, _ = run(votes_of_the_block_kernel, 1, 70, np.zeros((5, 70), np.int32), inp)
    assert (out[0] == (inp > 0).sum()).all()
    assert [bool(row[0]) for row in out[1:]] == [False, True, True, False]
    assert (out == out[:, :1]).all()


@cuda.jit
def two_places_kernel(out):
    shared = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    shared[t] = t
    if t < 32:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    out[t] = shared[63 - t]


@fact
def test_barriers_at_two_places_meet():
    assert (run(two_places_kernel, 1, 64, np.zeros(64, np.int32)) == 63 - np.arange(64)).all()


# Warps ----------------------------------------------------------------------------------------------------------------


@cuda.jit
def shuffles_kernel(out, inp):
    lane = cuda.laneid
    x = inp[lane]
    for step in range(32):
        out[0, step, lane] = cuda.shfl_xor_sync(FULL_MASK, x, step)
        out[1, step, lane] = cuda.shfl_up_sync(FULL_MASK, x, step)
        out[2, step, lane] = cuda.shfl_down_sync(FULL_MASK, x, step)
        out[3, step, lane] = cuda.shfl_sync(FULL_MASK, x, step)
    out[4, 0, lane] = cuda.shfl_sync(FULL_MASK, x, lane + 5)
    out[4, 1, lane] = cuda.shfl_down_sync(FULL_MASK, x, 34)
    out[4, 2, lane] = cuda.shfl_up_sync(FULL_MASK, x, 33)


@fact
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_shuffles(dtype):
    inp = values(32, dtype)
    out, _ = run(shuffles_kernel, 1, 32, np.zeros((5, 32, 32), dtype), inp)
    for step in range(32):
        assert (out[0, step] == inp[LANES ^ step]).all()
        assert (out[1, step] == np.where(LANES >= step, inp[LANES - step], inp)).all(), "from below lane 0: one's own"
        assert (out[2, step] == np.where(LANES + step < 32, inp[(LANES + step) % 32], inp)).all()
        assert (out[3, step] == inp[step]).all()
    assert (out[4, 0] == inp[(LANES + 5) % 32]).all(), "a lane past the warp is counted round"
    assert (out[4, 1] == np.where(LANES < 30, inp[(LANES + 2) % 32], inp)).all(), "the low five bits of a step count"
    assert (out[4, 2] == np.where(LANES >= 1, inp[LANES - 1], inp)).all()


@cuda.jit
def votes_kernel(out, inp, threshold):
    lane = cuda.laneid
    yes = inp[lane] > threshold
    out[0, lane] = cuda.all_sync(FULL_MASK, yes)
    out[1, lane] = cuda.any_sync(FULL_MASK, yes)
    out[2, lane] = cuda.eq_sync(FULL_MASK, yes)
    out[3, lane] = cuda.ballot_sync(FULL_MASK, yes)
    out[4, lane] = cuda.match_any_sync(FULL_MASK, lane % 3)
    out[5, lane] = cuda.lanemask_lt()
    cuda.syncwarp()
    everyone, agree = cuda.match_all_sync(FULL_MASK, int32(inp[lane] > threshold))
    out[6, lane] = everyone
    out[7, lane] = agree


def bits(condition):
    return np.bitwise_or.reduce(np.where(condition, 1 << LANES, 0)).astype(np.uint32).view(np.int32)


@fact
@pytest.mark.parametrize("threshold", [-1e6, 0, 1e6])
def test_votes(threshold):
    inp = values()
    out, _ = run(votes_kernel, 1, 32, np.zeros((8, 32), np.int32), inp, float(threshold))
    yes = inp > threshold
    agree = yes.all() or not yes.any()
    assert (out[0] == yes.all()).all()
    assert (out[1] == yes.any()).all()
    assert (out[2] == agree).all()
    assert (out[3] == bits(yes)).all()
    assert (out[4] == [bits(LANES % 3 == lane % 3) for lane in LANES]).all()
    assert (out[5].astype(np.int64) & FULL_MASK == (1 << LANES) - 1).all()
    assert (out[6] == (-1 if agree else 0)).all()
    assert (out[7] == agree).all()


@cuda.jit
def halves_kernel(out, inp):
    lane = cuda.laneid
    if lane < 16:
        out[lane] = cuda.shfl_xor_sync(0x0000FFFF, inp[lane], 1)
    else:
        out[lane] = cuda.shfl_xor_sync(0xFFFF0000, inp[lane], 2)
    cuda.syncwarp(FULL_MASK)
    out[32 + lane] = cuda.ballot_sync(0x00FF if lane < 8 else 0xFFFFFF00, 1)


@fact
def test_parts_of_a_warp_go_their_own_ways():
    inp = values()
    out, _ = run(halves_kernel, 1, 32, np.zeros(64, np.float32), inp)
    assert (out[:32] == np.where(LANES < 16, inp[LANES ^ 1], inp[LANES ^ 2])).all()
    assert (out[32:] == np.where(LANES < 8, 0xFF, -256)).all()


@cuda.jit
def meeting_kernel(out, inp):
    lane = cuda.laneid
    x = inp[lane]
    if lane < 5:
        out[lane] = cuda.shfl_xor_sync(FULL_MASK, x, 16)
    else:
        out[lane] = cuda.shfl_xor_sync(FULL_MASK, x, 16)


@fact
def test_lanes_meet_in_a_shuffle_from_two_places():
    inp = values()
    out, _ = run(meeting_kernel, 1, 32, np.zeros(32, np.float32), inp)
    assert (out == inp[LANES ^ 16]).all()


@cuda.jit
def exited_kernel(out):
    t = cuda.threadIdx.x
    if t % 32 >= 20:
        return
    out[t] = cuda.ballot_sync(FULL_MASK, 1)
    out[64 + t] = cuda.activemask() >> (t % 32) & 1


@fact
def test_lanes_that_have_exited_are_not_waited_for():
    out = run(exited_kernel, 1, 42, np.zeros(128, np.int64))
    assert (out[:20] == (1 << 20) - 1).all()
    assert (out[32:42] == (1 << 10) - 1).all(), "nor those that the block never had"
    assert (out[64:84] == 1).all() and (out[96:106] == 1).all(), "and each lane is active itself"


@cuda.jit
def bits_kernel(out, inp):
    t = cuda.grid(1)
    x = inp[t]
    out[0, t] = cuda.popc(x)
    out[1, t] = cuda.clz(x)
    out[2, t] = cuda.ffs(x)
    out[3, t] = cuda.brev(x)
    out[4, t] = cuda.selp(x > 100, 7, 8)


@fact
def test_functions_of_bits():
    inp = np.array([0, 1, 2, 255, 2**31 - 1, 12345678], np.uint32)
    out, _ = run(bits_kernel, 1, inp.size, np.zeros((5, inp.size), np.int64), inp)
    strings = [f"{x:032b}" for x in inp]
    assert out[0].tolist() == [s.count("1") for s in strings]
    assert out[1].tolist() == [len(s) - len(s.lstrip("0")) for s in strings]
    assert out[2].tolist() == [0 if "1" not in s else 32 - s.rindex("1") for s in strings]
    assert out[3].tolist() == [int(s[::-1], 2) for s in strings]
    assert out[4].tolist() == [7 if x > 100 else 8 for x in inp]


# Atomics --------------------------------------------------------------------------------------------------------------


@cuda.jit
def atomics_kernel(sums, extremes, tickets, matrix):
    t = cuda.grid(1)
    cuda.atomic.add(sums, t % 4, t)
    cuda.atomic.sub(sums, 4, 1)
    cuda.atomic.max(extremes, 0, t)
    cuda.atomic.min(extremes, 1, t - 50)
    cuda.atomic.exch(extremes, 2, 9)
    cuda.atomic.cas(extremes, 3, 5, 6)
    cuda.atomic.cas(extremes, 4, 5, 6)
    tickets[cuda.atomic.add(tickets, 100, 1)] = 1
    cuda.atomic.add(matrix, (t % 2, 1), 1)
    cuda.atomic.add(matrix[1], 2, 2)


@fact
def test_atomics():
    sums, extremes, tickets, matrix = run(
        atomics_kernel, 4, 25, np.zeros(5, np.float32), np.array([0, 0, 0, 5, 4], np.int32), np.zeros(101, np.int32),
        np.zeros((2, 3), np.int32),
    )  # fmt: skip
    t = np.arange(100)
    assert sums.tolist() == [t[t % 4 == i].sum() for i in range(4)] + [-100]
    assert extremes.tolist() == [99, -50, 9, 6, 4]
    assert (tickets[:100] == 1).all() and tickets[100] == 100, "every thread got a different old value"
    assert matrix.tolist() == [[0, 50, 0], [0, 50, 200]]


@cuda.jit
def counters_kernel(out):
    cuda.atomic.inc(out, 0, 6)
    cuda.atomic.dec(out, 1, 6)
    cuda.atomic.or_(out, 2, 1 << cuda.threadIdx.x)
    cuda.atomic.xor(out, 3, 1 << cuda.threadIdx.x)
    cuda.atomic.and_(out, 4, ~(1 << cuda.threadIdx.x))


@fact
def test_atomics_of_counters_and_bits():
    out = run(counters_kernel, 2, 10, np.array([0, 0, 0, 0, FULL_MASK], np.uint32))
    assert out.tolist() == [20 % 7, -20 % 7, 1023, 0, FULL_MASK - 1023]


# Numbers --------------------------------------------------------------------------------------------------------------


@cuda.jit
def arithmetic_kernel(out, inp, big):
    i = cuda.grid(1)
    out[i, 0] = math.exp(inp[i])
    out[i, 1] = math.log(inp[i])
    out[i, 2] = math.sqrt(inp[i])
    out[i, 3] = float32(1) / inp[i]
    out[i, 4] = cuda.fma(inp[i], inp[i], -inp[i])
    big[i] = big[i] * 2 // 2


@fact
def test_arithmetic_follows_ieee():
    inp = np.array(
        [1, 0, -1, 1e6, -np.inf, 1 + 2**-12], np.float32
    )  # the last one's square, rounded, loses its last bit
    out, big = run(arithmetic_kernel, 1, 6, np.zeros((6, 5), np.float32), inp, np.full(6, 2**31 - 1, np.int32))[::2]
    with np.errstate(all="ignore"):
        exact = inp.astype(np.float64)
        fma = exact * exact - exact
        truth = np.stack([np.exp(exact), np.log(exact), np.sqrt(exact), 1 / exact, fma], 1).astype(np.float32)
    np.testing.assert_allclose(out, truth, rtol=3e-7)
    assert (big == 2**31 - 1).all(), "int32 loads do not overflow when they are multiplied"


@cuda.jit
def narrowing_kernel(out, x):
    floats = cuda.local.array((1, 2), float32)
    ints = cuda.local.array(2, int32)
    shared = cuda.shared.array(1, float32)
    floats[0, 1] = shared[0] = x
    ints[1] = 2**32 + 7
    out[0], out[1], out[2] = floats[0, 1], shared[0], ints[1]


@fact
def test_a_store_rounds_to_the_type_of_the_array():
    assert run(narrowing_kernel, 1, 1, np.zeros(3), 0.1).tolist() == [np.float32(0.1), np.float32(0.1), 7]


@cuda.jit
def overflow_kernel(out):
    out[0] = out[1] * out[1]
    out[2] = out[0] - out[0]


@simulated
def test_overflow_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = run(overflow_kernel, 1, 1, np.full(3, 3e38, np.float32))
    assert out[0] == np.inf and np.isnan(out[2])


@cuda.jit
def types_kernel(out, inp, ints, number, kinds):
    x = inp[0]
    for y in (number, number * x, float64(x), float64(x) * x, math.exp(number), math.pow(number, x)):
        kinds.append(type(y))
    for y in (x * x, 2 * x, math.exp(x), math.tanh(x), math.pow(x, x), float32(1.5), abs(x), max(x, x), x / 3):
        kinds.append(type(y))
    kinds.append(type(ints[0]))
    ints[0] = 2**32 + 5
    ints[1] = -1
    ints[2] = int32(2**31)


@simulated
def test_numbers_have_the_types_that_numba_gives_them():
    out, inp, ints, kinds = np.zeros(1, np.float32), values(1), np.zeros(3, np.int32), []
    types_kernel[1, 1](out, inp, ints, 0.5, kinds)
    assert kinds == [np.float64] * 6 + [np.float32] * 9 + [int]
    assert ints.tolist() == [5, -1, -(2**31)], "stores wrap round"


@cuda.jit
def poison_kernel(out, ints):
    a = cuda.shared.array(4, float32)
    b = cuda.local.array(4, float32)
    c = cuda.shared.array(4, int32)
    d = cuda.shared.array(0, float32)
    out[0], out[1], out[2] = a[0], b[1], d[2]
    ints[0] = c[0]


@simulated
def test_what_nobody_wrote_is_poison():
    out, ints = run(poison_kernel, 2, 1, np.zeros(3, np.float32), np.zeros(1, np.int32), shared=12)
    assert np.isnan(out).all()
    assert ints[0] == POISON


@cuda.jit
def missing_barrier_kernel(out, step):
    shared = cuda.shared.array(34, float32)
    t = cuda.threadIdx.x
    shared[t + 1] = t
    out[cuda.grid(1)] = shared[t + 1 + step]


@simulated
@pytest.mark.parametrize("step", [-1, 1])
def test_a_missing_barrier_shows_in_one_of_two_blocks(step):
    out = run(missing_barrier_kernel, 2, 32, np.zeros(64, np.float32), step)
    assert np.isnan(out).sum() > 31


def without_line(function, number: int):
    """A device function of kernels/reduce.py with one of its lines left out."""
    lines = inspect.getsource(function).splitlines()
    source = "\n".join(lines[1:number] + lines[number + 1 :])  # nor its decorator
    names = dict(vars(reduce))
    exec(compile(source, function.__code__.co_filename, "exec"), names)
    return names[function.__name__]


def barriers_of(function):
    return [i for i, line in enumerate(inspect.getsource(function).splitlines()) if "cuda.syncthreads()" in line]


REDUCTIONS = {  # what is summed, of one number a thread, and its truth
    "block_sum": (lambda call, x: call(x), np.sum),
    "block_max": (lambda call, x: call(x), np.max),
    "block_sum2": (lambda call, x: call(x, x)[1], np.sum),
    "block_online": (lambda call, x: call(reduce.LOG2E * x, float32(1))[1], lambda x: np.exp(x - x.max()).sum()),
}
MISSING = [(name, line) for name in REDUCTIONS for line in (None, *barriers_of(getattr(reduce, name)))] if SIMULATE else []


@simulated
@pytest.mark.parametrize(("name", "line"), MISSING)
def test_a_missing_barrier_of_a_reduction_shows(name, line):
    """Each of a block's reductions without one of its barriers, and whole: called twice, as the first barrier keeps the
    second call's partial results off the first's."""
    reduction, (of_a_thread, truth) = getattr(reduce, name), REDUCTIONS[name]
    call = reduction if line is None else without_line(reduction, line)

    @cuda.jit
    def twice_kernel(out, inp):
        i = cuda.grid(1)
        out[0, i] = of_a_thread(call, inp[0, i])
        out[1, i] = of_a_thread(call, inp[1, i])

    inp = values(2 * 4 * 128).reshape(2, 4 * 128) / 100
    out, _ = run(twice_kernel, 4, 128, np.zeros_like(inp), inp)
    right = np.stack([[np.full(128, truth(block)) for block in row.reshape(4, 128)] for row in inp]).reshape(inp.shape)
    assert np.allclose(out, right, rtol=1e-5, atol=1e-4) == (line is None)


@cuda.jit
def outside_mask_kernel(out, inp):
    lane = cuda.laneid
    if lane < 16:
        out[lane] = cuda.shfl_down_sync(0xFFFF, inp[lane], 4)


@simulated
def test_a_lane_outside_of_the_mask_brings_poison():
    inp = values()
    out, _ = run(outside_mask_kernel, 1, 32, np.zeros(32, np.float32), inp)
    assert (out[:12] == inp[4:16]).all()
    assert np.isnan(out[12:16]).all()


# What the simulator refuses -------------------------------------------------------------------------------------------


def refuses(kernel, launch, *words):
    """The launch ends in one line that holds these words, the kernel's name, and the line marked `# here` in it."""
    lines, start = inspect.getsourcelines(kernel.py_func)
    line = start + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
    with pytest.raises(SimulatorError) as error:
        launch()
    message = str(error.value)
    for word in (*words, f"{kernel.__name__}, ", f"test_simulator.py:{line},"):
        assert word in message, f"{word!r} is not in: {message}"
    assert "\n" not in message
    assert (run(scale_kernel, 1, 32, np.empty(32, np.float32), values(), 1)[0] == values()).all(), (
        "the next launch works"
    )


@cuda.jit
def past_the_end_kernel(out):
    i = cuda.grid(1)
    out[i] = 1  # here


@cuda.jit
def negative_kernel(out):
    i = cuda.grid(1)
    out[i] = out[i - 1]  # here


@cuda.jit
def column_kernel(out):
    out[0, cuda.threadIdx.x] = 1  # here


@cuda.jit
def negative_column_kernel(out):
    out[0, cuda.threadIdx.x - 1] = 1  # here


@cuda.jit
def shared_index_kernel(out):
    tile = cuda.shared.array((2, 4), float32)
    tile[cuda.threadIdx.x, 0] = 1  # here


@cuda.jit
def local_index_kernel(out):
    mine = cuda.local.array(4, int32)
    for i in range(5):
        mine[i] = 0  # here


@simulated
def test_an_index_out_of_bounds():
    refuses(
        past_the_end_kernel, lambda: run(past_the_end_kernel, 3, 32, np.zeros(70, np.float32)),
        "index 70 is out of bounds", "of out", "size 70", "block (2, 0, 0), thread (6, 0, 0)",
    )  # fmt: skip
    negative = "index -1 is negative of out", "block (0, 0, 0), thread (0, 0, 0)"
    refuses(negative_kernel, lambda: run(negative_kernel, 3, 32, np.zeros(96, np.float32)), *negative)
    refuses(negative_kernel, lambda: run(negative_kernel, 3, 32, np.zeros(96, np.int32)), *negative)
    matrix = np.zeros((3, 4), np.float32)
    refuses(column_kernel, lambda: run(column_kernel, 1, 5, matrix), "index 4 is out of bounds for axis 1 with size 4")
    refuses(negative_column_kernel, lambda: run(negative_column_kernel, 1, 5, matrix), "index -1 is negative of out")
    refuses(
        shared_index_kernel, lambda: run(shared_index_kernel, 1, 3, matrix), "index 2", "of tile", "thread (2, 0, 0)"
    )
    refuses(local_index_kernel, lambda: run(local_index_kernel, 1, 3, matrix), "index 4", "of mine", "thread (0, 0, 0)")


@cuda.jit
def mask_without_caller_kernel(out):
    out[cuda.laneid] = cuda.shfl_xor_sync(0xFFFF, out[cuda.laneid], 1)  # here


@cuda.jit
def different_masks_kernel(out):
    lane = cuda.laneid
    out[lane] = cuda.shfl_xor_sync(FULL_MASK if lane < 16 else 0xFFFFFF00, out[lane], 1)  # here


@simulated
def test_masks_that_do_not_fit():
    out = np.zeros(32, np.float32)
    refuses(
        mask_without_caller_kernel, lambda: run(mask_without_caller_kernel, 1, 32, out),
        "shfl_xor_sync: lane 16", "0xffff ", "thread (16, 0, 0)",
    )  # fmt: skip
    refuses(
        different_masks_kernel, lambda: run(different_masks_kernel, 1, 32, out),
        "lanes of a warp name different masks: 0xffffffff", "0xffffff00 in lane 16",
    )  # fmt: skip


@cuda.jit
def stuck_elsewhere_kernel(out):
    lane = cuda.laneid
    if lane == 7:
        cuda.syncthreads()
    out[lane] = cuda.shfl_down_sync(FULL_MASK, out[lane], 1)  # here
    if lane != 7:
        cuda.syncthreads()


@cuda.jit
def different_operations_kernel(out):
    lane = cuda.laneid
    if lane < 16:
        cuda.syncwarp()  # here
    else:
        cuda.all_sync(FULL_MASK, True)


@cuda.jit
def reads_exited_kernel(out):
    lane = cuda.laneid
    if lane >= 20:
        return
    out[lane] = cuda.shfl_down_sync(FULL_MASK, out[lane], 16)  # here


@simulated
def test_a_lane_that_never_comes():
    out = np.zeros(32, np.float32)
    refuses(
        stuck_elsewhere_kernel, lambda: run(stuck_elsewhere_kernel, 1, 32, out),
        "shfl_down_sync with mask 0xffffffff waits for lane 7", "waits in syncthreads", "thread (0, 0, 0)",
    )  # fmt: skip
    refuses(
        different_operations_kernel, lambda: run(different_operations_kernel, 1, 32, out),
        "syncwarp with mask 0xffffffff waits for lane 16, which waits in all_sync",
    )  # fmt: skip
    exited = "lane 4 reads lane 20, which has exited", "thread (4, 0, 0)"
    refuses(reads_exited_kernel, lambda: run(reads_exited_kernel, 1, 32, out), *exited)
    refuses(reads_exited_kernel, lambda: run(reads_exited_kernel, 1, 20, out), *exited)


@cuda.jit
def barrier_in_a_branch_kernel(out):
    if cuda.threadIdx.x < 40:
        cuda.syncthreads()  # here


@cuda.jit
def two_barriers_kernel(out):
    if cuda.threadIdx.x < 40:
        cuda.syncthreads()  # here
    else:
        cuda.syncthreads_count(True)


@simulated
def test_a_barrier_that_not_all_reach():
    out = np.zeros(32, np.float32)
    refuses(
        barrier_in_a_branch_kernel, lambda: run(barrier_in_a_branch_kernel, 2, 64, out),
        "syncthreads is reached by 40 of 64 threads: thread (40, 0, 0) has exited", "block (0, 0, 0), thread (0, 0, 0)",
    )  # fmt: skip
    refuses(
        two_barriers_kernel, lambda: run(two_barriers_kernel, 2, 64, out),
        "reached by 40 of 64 threads: thread (40, 0, 0) waits in syncthreads_count",
    )  # fmt: skip


@cuda.jit(device=True)
def half(x):
    return x / undefined  # noqa: F821


@cuda.jit
def raises_kernel(out):
    out[0] = half(out[0])


@cuda.jit
def raises_two_lines_kernel(out):
    raise ValueError("one line\nand another")  # here


@simulated
def test_an_exception_of_two_lines_is_told_in_one():
    out = np.zeros(1, np.float32)
    refuses(raises_two_lines_kernel, lambda: run(raises_two_lines_kernel, 1, 1, out), "ValueError: one line and another")


@simulated
def test_an_exception_names_the_line_of_the_device_function_and_the_kernels():
    with pytest.raises(SimulatorError, match="NameError: name 'undefined' is not defined") as error:
        run(raises_kernel, 1, 1, np.zeros(1, np.float32))
    line, kernels = inspect.getsourcelines(half)[1] + 2, inspect.getsourcelines(raises_kernel.py_func)[1] + 2
    places = f"tests/test_simulator.py:{line}, called in tests/test_simulator.py:{kernels}"
    assert f"[raises_kernel, {places}, block" in str(error.value)
    assert isinstance(error.value.__cause__, NameError)


@cuda.jit
def large_shared_kernel(out):
    tile = cuda.shared.array((128, 100), float32)  # here
    tile[0, 0] = 1


@simulated
def test_launches_that_a_gpu_refuses():
    out = np.zeros(1, np.float32)
    for grid, block, shared, words in [
        (1, 1025, 0, "threads a block"),
        (1, (32, 33), 0, "threads a block"),
        (1, 0, 0, "threads a block"),
        (0, 1, 0, "blocks"),
        ((1, 65536), 1, 0, "blocks"),
        (1, 1, 228 * 1024, "bytes of shared memory"),
    ]:
        with pytest.raises(SimulatorError, match=f"past_the_end_kernel.*{words}"):
            run(past_the_end_kernel, grid, block, out, shared=shared)
    with pytest.raises(SimulatorError, match="how many blocks and threads"):
        past_the_end_kernel(out)
    refuses(large_shared_kernel, lambda: run(large_shared_kernel, 1, 1, out), "51200 bytes of static shared memory")


@cuda.jit
def row_sum_kernel(out, inp):
    partials = cuda.shared.array(4, float32)
    t = cuda.threadIdx.x
    x = float32(0)
    for i in range(t, inp.shape[1], cuda.blockDim.x):
        x += inp[cuda.blockIdx.x, i]
    offset = 16
    while offset > 0:
        x += cuda.shfl_xor_sync(FULL_MASK, x, offset)
        offset //= 2
    if cuda.laneid == 0:
        partials[t // 32] = x
    cuda.syncthreads()
    if t == 0:
        out[cuda.blockIdx.x] = partials[0] + partials[1] + partials[2] + partials[3]


@simulated
def test_a_block_of_128_threads_sums_a_row_of_768_in_a_few_milliseconds():
    inp = values(7680).reshape(10, 768)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        out, _ = run(row_sum_kernel, 10, 128, np.empty(10, np.float32), inp)
        seconds.append((time.process_time() - start) / 10)
    np.testing.assert_allclose(out, inp.astype(np.float64).sum(1), rtol=1e-5, atol=1e-3)
    assert min(seconds) < 0.04, "Numba's simulator takes 0.37 s"


@simulated
def test_the_simulator_knows_all_of_numba_cuda_that_the_kernels_use():
    import kernels.simulator as simulator
    from kernels.op import FOLDER

    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cuda":
                if path.parent != FOLDER or path.name == "reduce.py":
                    assert hasattr(simulator, node.attr), f"{path}:{node.lineno}: cuda.{node.attr}"
