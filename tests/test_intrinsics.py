"""Every intrinsic does what its instruction is defined to do: in the simulator, on a GPU, and in the PTX.

The facts run wherever TARGET says, so `make test-gpu` holds the hardware to the same truths. Run as a program under
LLM_NUMBA_TARGET=compile this file prints the PTX of its kernels.
"""

# ruff: noqa: I001 (the import of the intrinsics is a table)

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kernels.device import (
    FULL_MASK, SIMULATE, TARGET, address, atomic_add4, bar_sync, compute_capability, cp_async4, cp_async4_zfill, cp_async16,
    cp_async16_zfill, cp_async_commit, cp_async_wait, cuda, exp2_approx, float32, globaltimer, int32, ldmatrix_x2,
    ldmatrix_x4, load2, load4, load4_readonly, load4_streaming, log2_approx, mma_tf32, rcp_approx, rsqrt_approx,
    shfl_down_width, shfl_up_width, shfl_width, shfl_xor_width, store2, store4, store4_streaming, tanh_approx, to_device,
    to_host, to_tf32, uint64,
)  # fmt: skip
from kernels.matmul.wgmma import fence_async
from kernels.tma import (
    WORDS, cluster_rank, cluster_sync, copy_tile2, copy_tile3, fence_mbarrier_init, in_clusters, mbarrier_arrive,
    mbarrier_expect, mbarrier_init, mbarrier_wait, tensor_maps,
)  # fmt: skip

if SIMULATE:
    from kernels.simulator import SimulatorError

fact = pytest.mark.gpu if TARGET == "gpu" else pytest.mark.skipif(not SIMULATE, reason="nothing runs when compiling")
simulated = pytest.mark.skipif(not SIMULATE, reason="run with LLM_NUMBA_TARGET=simulator")

LANES = np.arange(32)


def run(kernel, grid, block, *args):
    """Launch with copies of the arrays, and return the first one as the kernel left it."""
    args = [to_device(a) if isinstance(a, np.ndarray) else a for a in args]
    kernel[grid, block](*args)
    return to_host(args[0])


def needs(*cc):
    if compute_capability() < cc:
        pytest.skip("needs compute capability {}.{}".format(*cc))


def values(*shape, dtype=np.float32, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 100).astype(dtype)


# Loads and stores of several elements ---------------------------------------------------------------------------------


@cuda.jit
def quads_kernel(out, inp):
    i = 4 * cuda.grid(1)
    a, b, c, d = load4(inp, i)
    store4(out, i, d, c, b, a)


@cuda.jit
def pairs_kernel(out, inp):
    i = 2 * cuda.grid(1)
    a, b = load2(inp, i)
    store2(out, i, b, a)


@fact
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("shape", [(64,), (8, 8), (2, 4, 8)])
def test_four_or_two_elements_at_once_counted_flat(shape, dtype):
    inp = values(*shape, dtype=dtype)
    assert (run(quads_kernel, 2, 8, np.zeros_like(inp), inp).reshape(-1, 4) == inp.reshape(-1, 4)[:, ::-1]).all()
    assert (run(pairs_kernel, 4, 8, np.zeros_like(inp), inp).reshape(-1, 2) == inp.reshape(-1, 2)[:, ::-1]).all()


@cuda.jit
def shared_quads_kernel(out, inp):
    tile = cuda.shared.array((32, 4), float32, alignment=16)
    t = cuda.threadIdx.x
    a, b, c, d = load4(inp, 4 * t)
    store4(tile, 4 * t, a, b, c, d)
    cuda.syncthreads()
    a, b, c, d = load4(tile, 4 * (31 - t))
    store4(out, 4 * t, a, b, c, d)


@fact
def test_four_elements_of_shared_memory_at_once():
    inp = values(32, 4)
    assert (run(shared_quads_kernel, 1, 32, np.zeros_like(inp), inp) == inp[::-1]).all()


@cuda.jit
def streaming_kernel(out, inp):
    i = 4 * cuda.grid(1)
    a, b, c, d = load4_streaming(inp, i)
    e, f, g, h = load4_readonly(inp, i)
    store4_streaming(out, i, a + e, b - f, c * g, d * float32(2) - h)


@fact
def test_streaming_and_read_only_forms_move_the_same_elements():
    inp = values(32, 4)
    a, b, c, d = inp.T
    assert (run(streaming_kernel, 2, 16, np.zeros_like(inp), inp) == np.stack([a + a, b - b, c * c, d], 1)).all()


@cuda.jit
def atomic_quads_kernel(out, inp):
    a, b, c, d = load4(inp, 4 * cuda.grid(1))
    atomic_add4(out, 4, a, b, c, d)


@fact
def test_atomic_addition_of_four_floats():
    needs(9, 0)
    inp = values(64, 4, dtype=np.int32).astype(np.float32)  # sums of small integers are exact in any order
    out = run(atomic_quads_kernel, 2, 32, np.ones((3, 4), np.float32), inp)
    assert (out == [[1] * 4, 1 + inp.sum(0), [1] * 4]).all()


# Approximate mathematics ----------------------------------------------------------------------------------------------


@cuda.jit
def approximations_kernel(out, inp):
    i = cuda.grid(1)
    out[i, 0] = tanh_approx(inp[i, 0])
    out[i, 1] = exp2_approx(inp[i, 0])
    out[i, 2] = log2_approx(inp[i, 1])
    out[i, 3] = rcp_approx(inp[i, 0])
    out[i, 4] = rsqrt_approx(inp[i, 1])


@fact
def test_approximations_are_as_close_as_the_ptx_isa_says():
    x = np.linspace(-20, 20, 640, dtype=np.float32)
    inp = np.stack([x, np.exp(x)], 1)
    out = run(approximations_kernel, 10, 64, np.zeros((640, 5), np.float32), inp).astype(np.float64)
    x, y = inp.T.astype(np.float64)
    np.testing.assert_allclose(out[:, 0], np.tanh(x), rtol=2**-10.9)
    np.testing.assert_allclose(out[:, 1], np.exp2(x), rtol=2**-22)
    np.testing.assert_allclose(out[:, 2], np.log2(y), rtol=2**-22, atol=2**-22)
    np.testing.assert_allclose(out[:, 3], 1 / x, rtol=2**-22)
    np.testing.assert_allclose(out[:, 4], 1 / np.sqrt(y), rtol=2**-22.4)


@fact
def test_approximations_at_the_ends():
    inp = np.array([[np.inf, np.inf], [-np.inf, 0], [0, 1], [200, 4]], np.float32)
    out = run(approximations_kernel, 1, 4, np.zeros((4, 5), np.float32), inp)
    truth = np.array([[1, -1, 0, 1], [np.inf, 0, 1, np.inf], [np.inf, -np.inf, 0, 2], [0, 0, np.inf, 1 / 200],
                      [0, np.inf, 1, 0.5]])  # fmt: skip
    np.testing.assert_allclose(out.T, truth, rtol=2**-22, atol=2**-22)


# Shuffles in segments -------------------------------------------------------------------------------------------------


@cuda.jit
def segments_kernel(out, inp, width):
    lane = cuda.laneid
    x = inp[lane]
    for step in range(32):
        out[0, step, lane] = shfl_width(FULL_MASK, x, step, width)
        out[1, step, lane] = shfl_up_width(FULL_MASK, x, step, width)
        out[2, step, lane] = shfl_down_width(FULL_MASK, x, step, width)
        out[3, step, lane] = shfl_xor_width(FULL_MASK, x, step, width)


@fact
@pytest.mark.parametrize("width", [2, 4, 8, 16, 32])
def test_shuffles_within_segments_of_a_warp(width):
    inp = values(32)
    out = run(segments_kernel, 1, 32, np.zeros((4, 32, 32), np.float32), inp, width)
    first = LANES // width * width
    for step in range(32):
        assert (out[0, step] == inp[first + step % width]).all()
        up, down, xor = LANES - step, LANES + step, LANES ^ step
        assert (out[1, step] == np.where(up >= first, inp[up], inp)).all()
        assert (out[2, step] == np.where(down < first + width, inp[down % 32], inp)).all()
        assert (out[3, step] == np.where(xor < first + width, inp[xor], inp)).all(), "earlier segments may be read"


# Tensor cores ---------------------------------------------------------------------------------------------------------


@cuda.jit
def to_tf32_kernel(out, inp):
    i = cuda.grid(1)
    out[i] = to_tf32(inp[i])


@fact
def test_to_tf32_rounds_to_ten_bits_ties_away_from_zero():
    needs(8, 0)
    ties = np.array([1 + 2**-11, -1 - 2**-11, 1 + 3 * 2**-11, 1 + 2**-12, 2 - 2**-12, 0, np.inf, -np.inf], np.float32)
    inp = np.concatenate([values(120), ties])
    fraction, exponent = np.frexp(inp.astype(np.float64))
    with np.errstate(invalid="ignore"):
        truth = np.ldexp(np.copysign(np.floor(np.abs(fraction) * 2**11 + 0.5), fraction) / 2**11, exponent)
    truth[-2:] = ties[-2:]
    assert (run(to_tf32_kernel, 1, 128, np.zeros(128, np.float32), inp) == truth).all()


@cuda.jit
def mma_kernel(d, a, b, c):
    """One warp; a (16, 8), b (8, 8), c and d (16, 8), each lane loading what the PTX ISA's tables give it."""
    g, t = cuda.laneid // 4, cuda.laneid % 4
    d0, d1, d2, d3 = mma_tf32(
        c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1],
        a[g, t], a[g + 8, t], a[g, t + 4], a[g + 8, t + 4],
        b[t, g], b[t + 4, g],
    )  # fmt: skip
    store2(d, 8 * g + 2 * t, d0, d1)
    store2(d, 8 * (g + 8) + 2 * t, d2, d3)


def cut(x):
    """What the tensor cores see of a float32: all but the low 13 bits."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


@fact
@pytest.mark.parametrize("rounded", [True, False], ids=["tf32", "float32"])
def test_mma_multiplies_what_ten_bits_of_mantissa_hold(rounded):
    needs(8, 0)
    a, b, c = values(16, 8), values(8, 8, seed=1), values(16, 8, seed=2)
    if rounded:
        a, b = cut(a).astype(np.float32), cut(b).astype(np.float32)
    d = run(mma_kernel, 1, 32, np.zeros((16, 8), np.float32), a, b, c)
    np.testing.assert_allclose(d, cut(a) @ cut(b) + c, rtol=1e-5, atol=1e-2)
    if not rounded:
        assert np.abs(d - (a.astype(np.float64) @ b + c)).max() > 1, "operands that were not rounded are cut off"


@cuda.jit
def ldmatrix_kernel(out, inp):
    """Rows of 12 floats in shared memory, of which each matrix takes four."""
    tile = cuda.shared.array((32, 12), float32, alignment=16)
    lane = cuda.laneid
    for j in range(12):
        tile[lane, j] = inp[lane, j]
    cuda.syncwarp()
    a, b, c, d = ldmatrix_x4(tile, 12 * lane + 4)
    store4(out, 8 * lane, a, b, c, d)
    a, b = ldmatrix_x2(tile, 12 * (31 - lane))
    store2(out, 8 * lane + 4, a, b)


@fact
def test_ldmatrix_gives_each_lane_an_element_of_each_matrix():
    inp = values(32, 12)
    out = run(ldmatrix_kernel, 1, 32, np.zeros((32, 8), np.float32), inp)
    for m in range(4):
        assert (out[:, m] == inp[8 * m : 8 * m + 8, 4:8].ravel()).all()
    for m in range(2):
        assert (out[:, 4 + m] == inp[::-1][8 * m : 8 * m + 8, :4].ravel()).all()


@cuda.jit
def tile_product_kernel(out, inp, weight):
    """out (16, 8) = inp (16, 8) @ weight (8, 8).T by one warp: ldmatrix brings the fragments that mma wants."""
    a = cuda.shared.array((16, 8), float32, alignment=16)
    b = cuda.shared.array((8, 8), float32, alignment=16)
    lane = cuda.laneid
    cp_async16(a, 4 * lane, inp, 4 * lane)
    if lane < 16:
        cp_async16(b, 4 * lane, weight, 4 * lane)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncwarp()
    a0, a1, a2, a3 = ldmatrix_x4(a, 8 * (lane % 16) + 4 * (lane // 16))
    b0, b1 = ldmatrix_x2(b, 8 * (lane % 8) + 4 * (lane // 8 % 2))
    zero = float32(0)
    d0, d1, d2, d3 = mma_tf32(
        zero, zero, zero, zero, to_tf32(a0), to_tf32(a1), to_tf32(a2), to_tf32(a3), to_tf32(b0), to_tf32(b1)
    )
    g, t = lane // 4, lane % 4
    store2(out, 8 * g + 2 * t, d0, d1)
    store2(out, 8 * (g + 8) + 2 * t, d2, d3)


@fact
def test_copies_ldmatrix_and_mma_multiply_two_tiles():
    needs(8, 0)
    inp, weight = values(16, 8), values(8, 8, seed=1)
    out = run(tile_product_kernel, 1, 32, np.zeros((16, 8), np.float32), inp, weight)
    truth = inp.astype(np.float64) @ weight.T
    assert np.linalg.norm(out - truth) < 1e-3 * np.linalg.norm(truth)


# Asynchronous copies --------------------------------------------------------------------------------------------------


@cuda.jit
def copies_kernel(out, inp, rows):
    """Row 0 in 16-byte copies, row 1 in 4-byte ones; rows 2 and 3 the same, but zeros where inp has no such row."""
    tile = cuda.shared.array((4, 32), float32, alignment=16)
    t = cuda.threadIdx.x
    if t < 8:
        cp_async16(tile, 4 * t, inp, 4 * t)
        cp_async16_zfill(tile, 64 + 4 * t, inp, 64 + 4 * t, rows > 2)
    cp_async4(tile, 32 + t, inp, 32 + t)
    cp_async4_zfill(tile, 96 + t, inp, 96 + t, rows > 3)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    for row in range(4):
        out[row, 31 - t] = tile[row, 31 - t]


@fact
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_asynchronous_copies_arrive_and_missing_rows_are_zeros(rows):
    needs(8, 0)
    inp = values(rows, 32)
    out = run(copies_kernel, 1, 32, np.full((4, 32), np.nan, np.float32), inp, rows)
    assert (out[:rows] == inp).all()
    assert (out[rows:] == 0).all()


STAGES = 3
PENDING = STAGES - 1


@cuda.jit
def pipeline_kernel(out, inp):
    """Sums the rows of inp, three rows under way at a time."""
    tile = cuda.shared.array((STAGES, 128), float32, alignment=16)
    t = cuda.threadIdx.x
    rows = inp.shape[0]
    for row in range(PENDING):
        cp_async16_zfill(tile, 128 * row + 4 * t, inp, 128 * row + 4 * t, row < rows)
        cp_async_commit()
    total = float32(0)
    for row in range(rows):
        ahead = row + PENDING
        cp_async16_zfill(tile, 128 * (ahead % STAGES) + 4 * t, inp, 128 * ahead + 4 * t, ahead < rows)
        cp_async_commit()
        cp_async_wait(PENDING)
        cuda.syncthreads()
        for i in range(4):
            total += tile[row % STAGES, 32 * i + t]
        cuda.syncthreads()
    cuda.atomic.add(out, 0, total)


@fact
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_pipeline_of_copies(rows):
    needs(8, 0)
    inp = values(rows, 128, dtype=np.int32).astype(np.float32)
    assert run(pipeline_kernel, 1, 32, np.zeros(1, np.float32), inp)[0] == inp.sum()


@cuda.jit
def impatient_kernel(out, inp):
    tile = cuda.shared.array((3, 4), float32, alignment=16)
    for row in range(3):
        cp_async16(tile, 4 * row, inp, 4 * row)
        if row < 2:
            cp_async_commit()
    out[0] = tile[0, 0]
    cp_async_wait(1)
    out[1], out[2] = tile[0, 1], tile[1, 1]
    cp_async_wait(0)
    out[3], out[4] = tile[1, 2], tile[2, 2]


@simulated
def test_copies_that_were_not_waited_for_read_as_poison():
    inp = values(3, 4)
    out = run(impatient_kernel, 1, 1, np.zeros(5, np.float32), inp)
    assert np.isnan(out).tolist() == [True, False, True, False, True]
    assert out[1] == inp[0, 1] and out[3] == inp[1, 2]


# Barriers and clocks --------------------------------------------------------------------------------------------------


@cuda.jit
def two_teams_kernel(out):
    """Warps 0 and 1 pass a number back and forth, while warps 2 and 3 do so half as often."""
    shared = cuda.shared.array(128, int32)
    t = cuda.threadIdx.x
    team = t // 64
    shared[t] = t
    for _ in range(4 if team == 0 else 2):
        bar_sync(1 + team, 64)
        x = shared[64 * team + (t + 1) % 64]
        bar_sync(1 + team, 64)
        shared[t] = x
    out[t] = shared[t]


@fact
def test_named_barriers_hold_a_part_of_the_block():
    t = np.arange(64)
    out = run(two_teams_kernel, 1, 128, np.zeros(128, np.int32))
    assert (out == np.concatenate([(t + 4) % 64, 64 + (t + 2) % 64])).all()


@cuda.jit
def clock_kernel(out):
    out[0] = globaltimer()
    for i in range(2, out.size):
        out[i] = i
    cuda.threadfence()
    out[1] = globaltimer()


@fact
def test_the_global_timer_counts_nanoseconds():
    start, end = run(clock_kernel, 1, 1, np.zeros(10000, np.uint64))[:2].tolist()
    assert 0 <= end - start < 1e9
    assert end > 0


# Tiles that one thread asks for ---------------------------------------------------------------------------------------


@cuda.jit
def tiles_kernel(out, maps, x, y, nbytes):
    """out (3,8,32): what stands in shared memory after two copies, as the second one's barrier lets go."""
    in_clusters(1)
    tile = cuda.shared.array(3 * 256, float32, alignment=1024)
    barriers = cuda.shared.array(2, uint64)
    thread = cuda.threadIdx.x
    for i in range(thread, 3 * 256, 32):
        tile[i] = -1
    if thread == 0:
        mbarrier_init(barriers, 0, 1)
        mbarrier_init(barriers, 1, 2)
        fence_mbarrier_init()
    fence_async()  # what was stored above comes before what the copies bring
    cluster_sync()
    if thread == 0:
        mbarrier_expect(barriers, 0, nbytes)
        copy_tile2(tile, 0, maps, 0, x, y, barriers, 0)
        mbarrier_wait(barriers, 0, 0)
        mbarrier_expect(barriers, 1, nbytes)
        copy_tile3(tile, 512, maps, WORDS, x, 1, y // 2, barriers, 1, 1)
    if thread == 31:
        mbarrier_arrive(barriers, 1, cluster_rank())
    mbarrier_wait(barriers, 1, 0)
    for i in range(thread, 3 * 256, 32):
        out[i // 256, i // 32 % 8, i % 32] = tile[i]


def unswizzled(tile):
    """Rows of 32 floats, of which row r keeps its chunk of four c at c ^ (r % 8)."""
    rows = tile.reshape(-1, 8, 4)
    return np.take_along_axis(rows, (np.arange(8) ^ np.arange(len(rows))[:, None] % 8)[:, :, None], 1).reshape(-1, 32)


@fact
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 4), (32, 14), (-4, -2)])
def test_tiles_arrive_swizzled_with_zeros_for_what_lies_outside(x, y):
    needs(9, 0)
    source = values(20, 44)
    array = to_device(source)
    maps = tensor_maps(
        (address(array), (44, 20), (44,), (32, 8), False),
        (address(array), (44, 2, 10), (44, 88), (32, 1, 8), True),  # its odd rows, rounded
    )
    out = to_device(np.zeros((3, 8, 32), np.float32))
    tiles_kernel[1, 32](out, maps, x, y, 4 * 256)
    padded = np.pad(source, ((4, 16), (4, 32)))
    first, between, second = to_host(out)
    assert (unswizzled(first) == padded[y + 4 : y + 12, x + 4 : x + 36]).all()
    assert (between == -1).all()
    odd = unswizzled(second)
    truth = padded[y // 2 * 2 + 5 : y // 2 * 2 + 21 : 2, x + 4 : x + 36]
    assert (odd.view(np.uint32) & 0x1FFF == 0).all()
    assert (abs(odd - truth) <= abs(truth) * 2.0**-11).all()


@cuda.jit
def barrier_kernel(out, count, arrivals, phases):
    barriers = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        if count:
            mbarrier_init(barriers, 0, count)
        for _ in range(arrivals):
            mbarrier_arrive(barriers, 0, 0)
        for phase in range(phases):
            mbarrier_wait(barriers, 0, phase & 1)
        mbarrier_wait(barriers, 0, phases & 1 ^ 1)
        out[0] = phases


@fact
@pytest.mark.parametrize(("count", "arrivals", "phases"), [(1, 0, 0), (1, 1, 1), (2, 2, 1)])
def test_a_wait_for_a_phase_that_is_over_is_over_at_once(count, arrivals, phases):
    needs(9, 0)
    assert run(barrier_kernel, 1, 1, values(1), count, arrivals, phases)[0] == phases


# What the simulator refuses -------------------------------------------------------------------------------------------


@cuda.jit
def unaligned_kernel(out, i):
    store4(out, i, 1, 2, 3, 4)


@cuda.jit
def unaligned_shared_kernel(out):
    tile = cuda.shared.array(8, float32)
    store4(out, 0, *load4(tile, 0))


@cuda.jit
def copy_to_global_kernel(out, inp):
    cp_async16(out, 0, inp, 0)


@cuda.jit
def copy_of_nothing_kernel(out, inp):
    tile = cuda.shared.array(4, float32, alignment=16)
    cp_async16_zfill(tile, 0, inp, 8, cuda.threadIdx.x == 0)


@cuda.jit
def ldmatrix_of_global_kernel(out):
    ldmatrix_x4(out, 4 * cuda.laneid)


@cuda.jit
def local_quads_kernel(out):
    mine = cuda.local.array(4, float32)
    store4(out, 0, *load4(mine, 0))


@cuda.jit
def bar_sync_kernel(out, name, count):
    bar_sync(name, count)


@cuda.jit
def misplaced_tile_kernel(out, maps):
    tile = cuda.shared.array(512, float32, alignment=1024)
    barriers = cuda.shared.array(1, uint64)
    mbarrier_init(barriers, 0, 1)
    copy_tile2(tile, 32, maps, 0, 0, 0, barriers, 0)


A_TENSOR = to_device(np.zeros((8, 32), np.float32))
A_MAP = to_host(tensor_maps((address(A_TENSOR), (32, 8), (32,), (32, 8), False))) if SIMULATE else None


@simulated
@pytest.mark.parametrize(
    ("words", "kernel", "block", "args"),
    [
        ("misaligned address: element 2 .* 16 bytes", unaligned_kernel, 1, (values(8), 2)),
        ("alignment=16", unaligned_shared_kernel, 1, (values(8),)),
        ("elements 8 to 11 are out of bounds for the 8 of out ", unaligned_kernel, 1, (values(8), 8)),
        ("elements -4 to -1 are out of bounds", unaligned_kernel, 1, (values(8), -4)),
        ("elements 8 to 11 .*thread .0, 0, 0.", copy_of_nothing_kernel, 1, (values(8), values(8))),
        ("cp_async takes an array in shared memory first", copy_to_global_kernel, 1, (values(8), values(8))),
        ("ldmatrix_x4 takes an array in shared memory first", ldmatrix_of_global_kernel, 32, (values(32, 4),)),
        ("a local array has no address", local_quads_kernel, 1, (values(8),)),
        ("mma_tf32 needs all 32 lanes of a warp", mma_kernel, 24, [values(16, 8)] * 4),
        ("bar_sync.0, 32.: a number of 1 to 15", bar_sync_kernel, 32, (values(8), 0, 32)),
        ("bar_sync.1, 33.: .*whole warps", bar_sync_kernel, 32, (values(8), 1, 33)),
        ("bar_sync 1 is reached by 32 of 64 threads", bar_sync_kernel, 32, (values(8), 1, 64)),
        ("barrier 0 was not initialized", barrier_kernel, 1, (values(1), 0, 1, 1)),
        ("mbarrier_wait waits for what does not come", barrier_kernel, 1, (values(1), 2, 1, 1)),
        ("a tile starts at a multiple of 1024 bytes", misplaced_tile_kernel, 1, (values(8, 32), A_MAP)),
    ],
)
def test_what_faults_on_a_gpu_is_refused(words, kernel, block, args):
    with pytest.raises(SimulatorError, match=words) as error:
        run(kernel, 1, block, *args)
    assert "\n" not in str(error.value)
    assert f"[{kernel.__name__}, tests/test_intrinsics.py:" in str(error.value)


@cuda.jit
def columns_kernel(out, inp):
    store4(out, 0, *load4(inp, 0))


@simulated
def test_a_strided_array_is_refused():
    with pytest.raises(SimulatorError, match="not C-contiguous"):
        columns_kernel[1, 1](values(4), values(4, 4).T)


# The PTX --------------------------------------------------------------------------------------------------------------


@cuda.jit
def variable_wait_kernel(out, n):
    cp_async_wait(n)


FLOATS, MATRIX = np.zeros(4, np.float32), np.zeros((4, 4), np.float32)

PTX = {  # kernel -> its arguments, the compute capability that it needs, and what must be in its PTX
    quads_kernel: ((FLOATS, FLOATS), (7, 5), ["ld.global.v4", "st.global.v4"]),
    pairs_kernel: ((MATRIX, MATRIX), (7, 5), ["ld.global.v2", "st.global.v2"]),
    shared_quads_kernel: ((MATRIX, MATRIX), (7, 5), ["ld.shared.v4", "st.shared.v4"]),
    streaming_kernel: ((FLOATS, FLOATS), (7, 5), ["ld.global.cs.v4.f32", "ld.global.nc.v4.f32", "st.global.cs.v4.f32"]),
    atomic_quads_kernel: ((MATRIX, MATRIX), (9, 0), ["red.global.add.v4.f32"]),
    approximations_kernel: (
        (MATRIX, MATRIX), (7, 5), ["tanh.approx.f32", "ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "rcp.approx.ftz.f32",
                                   "rsqrt.approx.ftz.f32"],
    ),
    segments_kernel: ((np.zeros((4, 32, 32), np.float32), FLOATS, 8), (7, 5), ["shfl.sync.idx", "shfl.sync.up"]),
    to_tf32_kernel: ((FLOATS, FLOATS), (8, 0), ["cvt.rna.tf32.f32"]),
    mma_kernel: ((MATRIX,) * 4, (8, 0), ["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"]),
    ldmatrix_kernel: ((MATRIX, MATRIX), (7, 5), ["ldmatrix.sync.aligned.m8n8.x4", "ldmatrix.sync.aligned.m8n8.x2"]),
    tile_product_kernel: ((MATRIX,) * 3, (8, 0), ["cp.async.cg.shared.global", "ldmatrix", "mma.sync"]),
    copies_kernel: ((MATRIX, MATRIX, 3), (8, 0), ["cp.async.ca.shared.global", "cp.async.wait_group 0"]),
    pipeline_kernel: ((FLOATS, MATRIX), (8, 0), ["cp.async.commit_group", "cp.async.wait_group 2"]),
    two_teams_kernel: ((np.zeros(4, np.int32),), (7, 5), ["bar.sync %r"]),
    clock_kernel: ((np.zeros(4, np.uint64),), (7, 5), ["%globaltimer"]),
    tiles_kernel: (
        (np.zeros((3, 8, 32), np.float32), np.zeros(32, np.uint64), 0, 0, 0), (9, 0),
        ["mbarrier.init", "fence.mbarrier_init", "mbarrier.arrive.expect_tx", "mapa", "mbarrier.try_wait", "barrier.cluster",
         "cp.async.bulk.tensor.2d", "cp.async.bulk.tensor.3d", ".reqnctapercluster 1"],
    ),
}  # fmt: skip
REFUSED = {
    variable_wait_kernel: ((FLOATS, 3), "cp_async_wait takes a literal integer"),
    columns_kernel: ((FLOATS, MATRIX.T), "load4 takes a C-contiguous array"),
}


def compile_all():
    """{kernel: {compute capability: PTX}}, and for those that must not compile {kernel: message}."""
    from numba.core.errors import NumbaError

    compiled = {}
    for kernel, (args, needed, _) in PTX.items():
        types = tuple(map(kernel.typeof_pyval, args))
        ptx = {"{}{}".format(*cc): cuda.compile_ptx(kernel.py_func, types, cc=cc)[0] for cc in (needed, (10, 0))}
        compiled[kernel.py_func.__name__] = ptx
    for kernel, (args, _) in REFUSED.items():
        try:
            cuda.compile_ptx(kernel.py_func, tuple(map(kernel.typeof_pyval, args)), cc=(9, 0))
        except NumbaError as error:
            compiled[kernel.py_func.__name__] = str(error)
    return compiled


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("numba.cuda.cudadrv.nvvm")
    program = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "LLM_NUMBA_TARGET": "compile", "PYTHONPATH": "."},
        capture_output=True, text=True,
    )  # fmt: skip
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


@pytest.mark.xdist_group("ptx")
def test_the_ptx_holds_the_instructions(compiled):
    for kernel, (_, needed, instructions) in PTX.items():
        ptx = compiled[kernel.__name__]["{}{}".format(*needed)]
        for instruction in instructions:
            assert instruction in ptx, f"{kernel.__name__} has no {instruction}"


@pytest.mark.xdist_group("ptx")
def test_the_assembler_takes_the_ptx(compiled, tmp_path):
    if not shutil.which("ptxas"):
        pytest.skip("there is no ptxas: it comes with the CUDA toolkit")
    for kernel in PTX:
        for capability, ptx in compiled[kernel.__name__].items():
            file = tmp_path / f"{kernel.__name__}_{capability}.ptx"
            version = ptx.split(".version ")[1].split()[0]
            file.write_text(ptx.replace(f".version {version}", ".version 8.8"))  # ptxas may be older than NVVM
            ptxas = subprocess.run(["ptxas", "-arch", f"sm_{capability}", file, "-o", "/dev/null"], capture_output=True)
            assert ptxas.returncode == 0, f"{file.name}: {ptxas.stderr.decode()}"


@pytest.mark.xdist_group("ptx")
def test_numba_refuses_in_a_sentence(compiled):
    for kernel, (_, sentence) in REFUSED.items():
        assert sentence in compiled[kernel.__name__]


if __name__ == "__main__":
    print(json.dumps(compile_all()))
