"""Attention where the registry's shapes do not look: scores far apart, rows that see one key, head sizes, many tiles."""

import re

import numpy as np
import pytest

import cpu_reference
from kernels.attention.backward import attention_backward
from kernels.attention.forward import attention_forward
from kernels.attention.tiles import HEAD_SIZES
from kernels.check import Problem, check, is_right, relative_error
from kernels.device import TARGET, ShapeError, free_scratch, synchronize, to_device, to_host

VERSIONS = [*attention_forward.versions.values(), *attention_backward.versions.values()]

each_version = pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.op.name}-{v.number}")
simulated = pytest.mark.skipif(TARGET != "simulator", reason="run with LLM_NUMBA_TARGET=simulator")


def tiny(version) -> dict:
    return {"B": 1, "T": 5, "NH": 1, "hs": 64 if version.number == 8 else 16}


def skip_where_it_cannot_run(version):
    if reason := version.why_not():
        pytest.skip(f"{version.op.name} {version.number} {reason}")


def run(version, arguments: dict) -> dict:
    """The arguments after a call, back on the host."""
    on_device = {name: to_device(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    version(*on_device.values())
    synchronize()
    return {name: to_host(a) if isinstance(arguments[name], np.ndarray) else a for name, a in on_device.items()}


def with_scores_far_apart(op, shape: dict) -> Problem:
    """Queries and keys ten times as large: scores a hundred times, so that most probabilities underflow."""
    rng = np.random.default_rng(3)
    arguments = op.make_arguments(rng, **shape)
    C = shape["NH"] * shape["hs"]
    arguments["qkv"][:, :, : 2 * C] *= 10
    if op is attention_backward:  # what the forward makes of it
        out, lse = np.empty(arguments["out"].shape), np.empty(arguments["lse"].shape)
        cpu_reference.attention_forward(out, lse, arguments["qkv"].astype(np.float64), shape["NH"])
        arguments["out"], arguments["lse"] = out.astype(np.float32), lse.astype(np.float32)
    exact = {name: a.astype(np.float64) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    op.reference(*exact.values())
    return Problem(op, shape, arguments, op.results(exact, shape))


def check_scores_far_apart(version, shape: dict):
    skip_where_it_cannot_run(version)
    problem = with_scores_far_apart(version.op, shape)
    results = run(version, problem.arguments)
    for name, true in problem.truth.items():
        assert np.isfinite(results[name]).all(), f"{name} is not finite"
        # a score of 100 is known to 100 * 2^-11 in TF32: its probability no better. In float32 it is a sum of hs products
        # that cancel, each rounded to 2^-24 of sums ten times as large as itself
        limit = 0.1 if version.precision == "tf32" else 100 * 10 * shape["hs"] ** 0.5 * 2**-24
        assert relative_error(results[name], true) < limit, name


@simulated
@each_version
def test_scores_a_hundred_times_as_large_stay_finite(version):
    check_scores_far_apart(version, tiny(version))


@pytest.mark.gpu
@each_version
def test_scores_a_hundred_times_as_large_stay_finite_on_the_gpu(version):
    check_scores_far_apart(version, {"B": 2, "T": 300, "NH": 2, "hs": 64})
    free_scratch()


def check_first_query(version, shape: dict):
    """The first query sees one key: its out is that key's value, and no gradient reaches its q."""
    skip_where_it_cannot_run(version)
    arguments = version.op.make_arguments(np.random.default_rng(4), **shape)
    C, NH, hs = shape["NH"] * shape["hs"], shape["NH"], shape["hs"]
    results = run(version, arguments)
    tolerance = version.tolerance
    if version.op is attention_forward:
        q, k, v = np.split(arguments["qkv"][:, 0].astype(np.float64), 3, axis=1)
        np.testing.assert_allclose(results["out"][:, 0], v, rtol=tolerance)
        scores = (q * k).reshape(-1, NH, hs).sum(-1) / np.sqrt(hs)
        np.testing.assert_allclose(results["lse"][:, :, 0], scores, atol=10 * tolerance)
    else:
        rest = np.abs(results["dqkv"]).max()
        assert np.abs(results["dqkv"][:, 0, :C]).max() <= 10 * tolerance * rest


@simulated
@each_version
def test_the_first_query_sees_one_key(version):
    check_first_query(version, tiny(version))


@pytest.mark.gpu
@each_version
def test_the_first_query_sees_one_key_on_the_gpu(version):
    check_first_query(version, {"B": 3, "T": 200, "NH": 2, "hs": 64})
    free_scratch()


def refusal(version, **shape) -> str:
    with pytest.raises(ShapeError) as refused:
        run(version, version.op.make_arguments(np.random.default_rng(5), **shape))
    return str(refused.value)


@each_version
def test_a_head_size_that_no_tile_has_is_left_to_the_versions_before_the_tiles(version):
    skip_where_it_cannot_run(version)
    if version.number > 4:
        told = "needs a head size among .*128.*, got 48 channels in 2 heads"
        assert re.fullmatch(told, refusal(version, B=1, T=2, NH=2, hs=24))
    elif TARGET != "compile":
        errors = check(version, Problem.of(version.op, {"B": 1, "T": 3, "NH": 2, "hs": 40}, seed=5))
        assert is_right(version, errors), errors


def test_heads_too_large_for_registers_or_shared_memory_are_refused_in_a_sentence():
    told = refusal(attention_backward.versions[2], B=1, T=1, NH=1, hs=129)
    assert told == "needs heads of at most 128 channels, which a warp holds in registers, got 129"
    told = refusal(attention_forward.versions[2], B=1, T=1, NH=1, hs=1024)
    assert told.startswith("needs 529024 bytes of shared memory a block, and this card gives ")


@each_version
def test_channels_that_the_heads_cannot_share_are_refused_in_a_sentence(version):
    skip_where_it_cannot_run(version)
    arguments = version.op.make_arguments(np.random.default_rng(5), B=1, T=1, NH=1, hs=16) | {"NH": 3}
    with pytest.raises(ShapeError, match="needs .*, got 16 channels in 3 heads"):
        run(version, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("hs", HEAD_SIZES)
@each_version
def test_every_head_size_is_right_over_many_tiles(version, hs):
    skip_where_it_cannot_run(version)
    if version.number == 8 and hs != 64:
        pytest.skip("version 8 is for heads of 64")
    errors = check(version, Problem.of(version.op, {"B": 2, "T": 333, "NH": 3, "hs": hs}, seed=6))
    assert is_right(version, errors), errors
    free_scratch()


@pytest.mark.gpu
@pytest.mark.parametrize("number", [5, 7, 8, 9])
def test_the_gradients_are_the_same_bits_again(number):
    version = attention_backward.versions[number]
    skip_where_it_cannot_run(version)
    arguments = attention_backward.make_arguments(np.random.default_rng(7), B=4, T=1024, NH=4, hs=64)
    first = run(version, arguments)["dqkv"]
    assert all(np.array_equal(first, run(version, arguments)["dqkv"]) for _ in range(3))


# ---- version 8: wgmma ----


@simulated
@pytest.mark.parametrize("op", [attention_forward, attention_backward], ids=lambda op: op.name)
def test_wgmma_is_right_over_many_tiles(op):
    """Four tiles, so that each buffer is used again; in the second block one warp group has no row of its own, and in the first
    one group ends a step before the other."""
    version = op.versions[8]
    errors = check(version, Problem.of(op, {"B": 1, "T": 190, "NH": 1, "hs": 64}, seed=9))
    assert is_right(version, errors), errors


def test_wgmma_refuses_other_heads_in_a_sentence():
    for version in attention_forward.versions[8], attention_backward.versions[8]:
        skip_where_it_cannot_run(version)
        arguments = version.op.make_arguments(np.random.default_rng(5), B=1, T=2, NH=2, hs=32)
        with pytest.raises(ShapeError, match="needs heads of 64 channels, got 32"):
            run(version, arguments)


@simulated
def test_the_blocks_of_a_tile_meet_in_no_bank_either_way():
    """Eight lanes read or write 16 bytes each at once: from eight different groups of banks, in a tile and in a transposed one."""
    from kernels.attention import wgmma
    from kernels.device import cuda

    @cuda.jit
    def my_blocks(rows, pieces):
        rows[cuda.threadIdx.x], pieces[cuda.threadIdx.x] = wgmma.my_block()

    rows, pieces = np.empty((2, wgmma.THREADS), np.int32)
    my_blocks[1, wgmma.THREADS](rows, pieces)
    assert len({(row + 2 * i, piece) for row, piece in zip(rows, pieces, strict=True) for i in range(4)}) == 64 * 16
    for i in range(4):
        lying, turned = (pieces ^ (rows + 2 * i)) & 7, ((rows >> 2 & 6) + (rows & 1)) ^ ((4 * pieces + i) & 7)
        assert all(len(set(eight)) == 8 for places in (lying, turned) for eight in places.reshape(-1, 8))


@simulated
def test_what_cutting_off_takes_is_made_up_for():
    from kernels.attention.wgmma import MADE_UP

    x = np.random.default_rng(10).standard_normal(100_000).astype(np.float32)
    cut = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    shrunk = np.sum(cut * x) / np.sum(x.astype(np.float64) ** 2)
    assert abs(shrunk * float(MADE_UP) - 1) < 5e-5 < 3e-4 < 1 - shrunk


@simulated
def test_an_unrounded_operand_would_show():
    """The TF32 versions round: cutting the low bits off instead would shrink every number, by less than a check can see."""
    from kernels.attention import tiles

    x = np.random.default_rng(8).uniform(1, 2, 10_000).astype(np.float32)
    cut = lambda values: np.bitwise_and(values.view(np.uint32), np.uint32(0xFFFFE000)).view(np.float32)  # noqa: E731
    rounded = cut(np.array([tiles.round_tf32(value) for value in x]))
    assert abs(np.mean(rounded.astype(np.float64) - x)) < 1e-5 < 2e-4 < abs(np.mean(cut(x).astype(np.float64) - x))


# ---- version 9: three products of TF32 ----


def check_digits(sums: int):
    """One warp multiplies 16 x 8 by 8 x 8 and adds it up `sums` times: one product of TF32 sees its
    operands to 2^-11, three to 2^-22. What a tensor core cuts off as it adds comes on top, each time."""
    from kernels.attention.tiles import multiply
    from kernels.device import cuda, float32

    @cuda.jit
    def product(out, a, b, tf32):
        acc, small = cuda.local.array((1, 1, 4), float32), cuda.local.array((1, 1, 4), float32)
        g, t = cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
        for i in range(4):
            acc[0, 0, i], small[0, 0, i] = float32(0), float32(0)
        for _ in range(sums):
            a0, a1, a2, a3 = a[g, t], a[g + 8, t], a[g, t + 4], a[g + 8, t + 4]
            multiply(acc, small, 0, 0, a0, a1, a2, a3, b[t, g], b[t + 4, g], tf32)
        for i in range(4):
            out[g + 8 * (i >> 1), 2 * t + (i & 1)] = acc[0, 0, i] + small[0, 0, i]

    rng, errors = np.random.default_rng(11), {}
    a, b = rng.uniform(1, 2, (16, 8)).astype(np.float32), rng.uniform(1, 2, (8, 8)).astype(np.float32)
    for tf32 in 1, 3:
        out = to_device(np.empty((16, 8), np.float32))
        product[1, 32](out, to_device(a), to_device(b), tf32)
        synchronize()
        errors[tf32] = relative_error(to_host(out), sums * (a.astype(np.float64) @ b.astype(np.float64)))
    assert errors[1] > 1e-4 and errors[3] < 2**-22 + sums * 2**-23, errors


@simulated
def test_three_products_have_nearly_all_digits():
    check_digits(4)


@pytest.mark.gpu
def test_three_products_have_nearly_all_digits_on_the_gpu():
    check_digits(8)  # as many as a head of 64 channels takes


@simulated
def test_three_products_are_right_over_many_tiles():
    """Three steps, so that a buffer is used again."""
    problem = Problem.of(attention_forward, {"B": 1, "T": 130, "NH": 1, "hs": 16}, seed=12)
    errors = check(attention_forward.versions[9], problem)
    assert max(errors.values()) < 1e-6, errors


NAN_OF_A_GPU = np.uint32(0x7FFFFFFF).view(np.float32)


@simulated
@pytest.mark.parametrize("number", [4, 5, 6, 7, 9])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_a_nan_shows_in_every_row_that_sees_it(number, part):
    """Training on would hide it. Rounding adds to the bits of a number: those of a NaN must stay a NaN's."""
    problem = Problem.of(attention_forward, {"B": 1, "T": 5, "NH": 1, "hs": 64})
    problem.arguments["qkv"][0, 2, 64 * ["query", "key", "value"].index(part) + 7] = NAN_OF_A_GPU
    shows = np.isnan(run(attention_forward.versions[number], problem.arguments)["out"]).any(axis=-1)[0]
    assert shows[2:3].all() if part == "query" else shows[2:].all()


@simulated
@pytest.mark.parametrize("number", [4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("name", ["dout", "qkv"])
def test_a_nan_shows_in_the_gradients(number, name):
    problem = Problem.of(attention_backward, {"B": 1, "T": 5, "NH": 1, "hs": 64})
    problem.arguments[name][0, 2, -1] = NAN_OF_A_GPU
    assert np.isnan(run(attention_backward.versions[number], problem.arguments)["dqkv"]).any()


def compile_three_products(op: str) -> list[str]:
    """The PTX for an H100 of version 9's kernels that have products."""
    from kernels.compile import compile_version
    from kernels.op import load_all

    shape = {"B": 1, "T": 130, "NH": 1, "hs": 64}
    compiled = [ptx for _, ptx in compile_version(load_all()[op].versions[9], [(9, 0)], shape)[9, 0]]
    return [ptx for ptx in compiled if "mma.sync" in ptx]


@pytest.mark.parametrize(("op", "products"), [("attention_forward", [384]), ("attention_backward", [576, 384])])
def test_the_sums_of_three_products_stay_in_registers(op, products, compiler):
    compiled = compiler.submit(compile_three_products, op).result()
    assert [ptx.count("mma.sync") for ptx in compiled] == products
    assert not any(".local" in ptx for ptx in compiled), "an array has left its registers"
