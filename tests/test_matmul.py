"""The engines of the matmul: right for every layout, split and ending, and in registers."""

import dataclasses
from functools import partial

import numpy as np
import pytest

import cpu_reference
from kernels.device import TARGET, ShapeError, to_device, to_host
from kernels.intrinsics import to_tf32
from kernels.matmul import engine, tma, wgmma
from kernels.matmul.cores import round_tf32, seen
from kernels.matmul.epilogue import ADD, BIAS, BIAS_GELU, BIAS_RESIDUAL, SLOPE, STORE
from kernels.matmul.tiles import PAD, swizzle
from kernels.matmul.transpose import transpose
from kernels.op import load_all

in_the_simulator = pytest.mark.skipif(TARGET != "simulator", reason="run with LLM_NUMBA_TARGET=simulator")
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def relative_error(result, truth):
    return np.linalg.norm(result - truth) / np.linalg.norm(truth)


def finished(product, epilogue, bias, extra):
    """What an epilogue makes of a product, in float64; and what it leaves in `extra`."""
    product, bias, extra = (x.astype(np.float64) for x in (product, bias, extra))
    if epilogue == STORE:
        return product, None
    if epilogue == BIAS:
        return product + bias, None
    if epilogue == BIAS_RESIDUAL:
        return extra + product + bias, None
    if epilogue == ADD:
        return extra + product, None
    out = np.empty(product.size)
    if epilogue == BIAS_GELU:
        pre = product + bias
        cpu_reference.gelu_forward(out, pre.ravel())
        return out.reshape(pre.shape), pre
    cpu_reference.gelu_backward(out, extra.ravel(), product.ravel())
    return out.reshape(product.shape), None


@in_the_simulator
@pytest.mark.parametrize("tf32", [0, 1, 3])
@pytest.mark.parametrize("a_m_major", [False, True])
@pytest.mark.parametrize("b_m_major", [False, True])
@pytest.mark.parametrize(("M", "N", "K", "splits"), [(40, 36, 68, 1), (5, 7, 33, 1), (33, 8, 100, 3)])
def test_the_engine_multiplies_every_layout_whole_and_split(M, N, K, splits, a_m_major, b_m_major, tf32):
    a, b = normal(M, K), normal(N, K)
    out = np.full((M, N), np.nan, np.float32)
    lie = lambda x, m_major: np.ascontiguousarray(x.T) if m_major else x  # noqa: E731
    engine.multiply(
        out, lie(a, a_m_major), lie(b, b_m_major),
        a_m_major=a_m_major, b_m_major=b_m_major, tf32=tf32, splits=splits,
    )  # fmt: skip
    assert relative_error(out, a.astype(np.float64) @ b.T) < {0: 1e-6, 1: 2e-3, 3: 1e-6}[tf32]


@in_the_simulator
@pytest.mark.parametrize("shape", [(4, 4), (8, 68), (132, 4), (100, 72)])
def test_an_operand_is_transposed_as_it_is_or_rounded(shape):
    inp = normal(*shape)
    np.testing.assert_array_equal(transpose(inp, rounded=False), inp.T)
    np.testing.assert_array_equal(transpose(inp), np.vectorize(to_tf32, otypes=[np.float32])(inp.T))


@in_the_simulator
@pytest.mark.parametrize(
    "tile", [*engine.FP32_TILES, *engine.TF32_TILES, *engine.THREE_PRODUCTS_TILES],
    ids=lambda tile: f"{tile.BM}x{tile.BN}-{tile.tf32}",
)  # fmt: skip
def test_every_tile_of_the_engine_is_right(tile, monkeypatch):
    monkeypatch.setattr(engine, "multiprocessors", lambda: 1)
    M, N, K = (36, 44, 40) if tile.BM > 64 else (68, 44, 40)  # of the small one two, for one block
    a, b, out = normal(M, K), normal(K, N), np.full((M, N), np.nan, np.float32)
    engine.multiply(out, a, b, b_m_major=True, tile=dataclasses.replace(tile, blocks=1), splits=1)
    assert relative_error(out, a.astype(np.float64) @ b) < {0: 1e-6, 1: 2e-3, 3: 1e-6}[tile.tf32]


@in_the_simulator
@pytest.mark.parametrize("epilogue", [STORE, BIAS, BIAS_GELU, BIAS_RESIDUAL, SLOPE, ADD])
@pytest.mark.parametrize(("N", "splits"), [(12, 1), (12, 2), (7, 1)])
def test_the_engine_ends_as_told(epilogue, N, splits):
    M, K = 9, 40
    a, b, bias, extra = normal(M, K), normal(N, K), normal(N), normal(M, N)
    out, truth = np.full((M, N), np.nan, np.float32), finished(a.astype(np.float64) @ b.T, epilogue, bias, extra)
    if epilogue == ADD:
        out = extra
    engine.multiply(out, a, b, epilogue=epilogue, bias=bias, extra=extra, tf32=False, splits=splits)
    assert relative_error(out, truth[0]) < 1e-5
    if truth[1] is not None:
        assert relative_error(extra, truth[1]) < 1e-5


HOPPER = {  # engine, tile, error
    "wgmma": (wgmma, wgmma.Tile(2, 64), 2e-3),
    "tma": (tma, tma.Tile(128), 2e-3),
    "tma-3xtf32": (tma, tma.Tile(128, tf32=3), 1e-6),
}


@in_the_simulator
@pytest.mark.parametrize(("core", "tile", "limit"), HOPPER.values(), ids=HOPPER)
@pytest.mark.parametrize("a_m_major", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_wgmma_multiplies_every_layout_that_it_knows(core, tile, limit, a_m_major, transposed, splits):
    M, N, K = 68, 20, 132  # two warp groups, three pairs of steps
    a, b = normal(M, K), normal(N, K)
    out = np.full((N, M) if transposed else (M, N), np.nan, np.float32)
    core.multiply(
        out, np.ascontiguousarray(a.T) if a_m_major else a, b,
        a_m_major=a_m_major, transposed=transposed, tile=tile, splits=splits,
    )  # fmt: skip
    truth = a.astype(np.float64) @ b.T
    assert relative_error(out, truth.T if transposed else truth) < limit


@in_the_simulator
@pytest.mark.parametrize(("core", "tile", "limit"), HOPPER.values(), ids=HOPPER)
@pytest.mark.parametrize(
    ("epilogue", "transposed"),
    [(BIAS, False), (BIAS_GELU, False), (BIAS_RESIDUAL, False), (SLOPE, True), (ADD, True), (ADD, False)],
)
def test_wgmma_ends_as_told(core, tile, limit, epilogue, transposed):
    M, N, K = 20, 100, 36
    a, b, bias, extra = normal(M, K), normal(N, K), normal(N), normal(M, N)
    truth = finished(a.astype(np.float64) @ b.T, epilogue, bias, extra)
    extra = np.ascontiguousarray(extra.T) if transposed else extra
    out = extra if epilogue == ADD else np.full_like(extra, np.nan)
    bias = None if transposed else bias
    core.multiply(out, a, b, epilogue=epilogue, bias=bias, extra=extra, transposed=transposed, tile=tile, splits=1)
    assert relative_error(out.T if transposed else out, truth[0]) < limit
    if truth[1] is not None:
        assert relative_error(extra, truth[1]) < limit


@in_the_simulator
@pytest.mark.parametrize(("BN", "a_m_major", "tf32"), [(192, False, 1), (256, True, 1), (128, False, 3), (128, True, 3)])
def test_a_block_goes_from_tile_to_tile_and_stages_round_the_ring(BN, a_m_major, tf32, monkeypatch):
    monkeypatch.setattr(tma, "multiprocessors", lambda: 1)
    M, N, K = 100, BN + 8, 164  # two tiles for a block, six steps for four or five stages
    a, b = normal(M, K), normal(N, K)
    out = np.full((M, N), np.nan, np.float32)
    tile, a_lies = tma.Tile(BN, tf32=tf32), np.ascontiguousarray(a.T) if a_m_major else a
    tma.multiply(out, a_lies, b, a_m_major=a_m_major, tile=tile, splits=1)
    assert relative_error(out, a.astype(np.float64) @ b.T) < {1: 2e-3, 3: 1e-6}[tf32]


@in_the_simulator
def test_rounding_for_the_tensor_cores_is_to_nearest_and_keeps_nan():
    numbers = [*normal(500), 0.0, -0.0, 1e-38, -3e38, 1 + 2.0**-11, -1 - 2.0**-11, np.inf, -np.inf]
    assert all(seen(round_tf32(x)) == to_tf32(x) for x in map(np.float32, numbers))
    for bits in (0x7FFFFFFF, 0x7FC00000, 0xFFC00000):
        assert np.isnan(seen(round_tf32(np.uint32(bits).view(np.float32))))


@in_the_simulator
def test_what_a_tensor_core_sees_and_the_rest_are_the_whole_and_two_times_11_bits_nearly_that():
    x = np.concatenate([normal(500), [0.0, 1e-30, -3e38, 1 + 2.0**-23, 2 - 2.0**-23]]).astype(np.float32)
    cut = lambda values: np.array([seen(value) for value in values])  # noqa: E731
    first = cut(x)
    rest = x - first
    np.testing.assert_array_equal(first.astype(np.float64) + rest, x)
    np.testing.assert_array_less(abs(first.astype(np.float64) + cut(rest) - x), 2.0**-21 * abs(x) + 1e-45)
    assert (first.view(np.uint32) & 0x1FFF == 0).all()


@in_the_simulator
@pytest.mark.parametrize("operand", ["inp", "weight"])
@pytest.mark.parametrize("number", [8, 10, 12, 13, 15, 16])
def test_a_nan_in_an_operand_reaches_the_product(number, operand):
    given, out = {"inp": normal(4, 8), "weight": normal(4, 8)}, np.zeros((4, 4), np.float32)
    given[operand][2, 3] = np.uint32(0x7FFFFFFF).view(np.float32)
    load_all()["matmul_forward"].versions[number](out, given["inp"], given["weight"], None)
    shows = np.isnan(out).any(axis=1 if operand == "inp" else 0)
    assert np.array_equal(shows, [False, False, True, False])


@in_the_simulator
@pytest.mark.parametrize("number", [12, 13, 16])
def test_an_operand_that_is_not_aligned_is_refused_before_it_is_transposed(number):
    def not_aligned(*shape):
        return np.empty(np.prod(shape) + 1, np.float32)[1:].reshape(shape)

    aligned = np.empty((8, 8), np.float32)
    ops = load_all()
    with pytest.raises(ShapeError, match="aligned to 16 bytes"):
        ops["matmul_backward_input"].versions[number](np.empty((8, 8), np.float32), aligned, not_aligned(8, 8))
    with pytest.raises(ShapeError, match="aligned to 16 bytes"):
        ops["matmul_backward_weight"].versions[number](np.empty((8, 8), np.float32), aligned, not_aligned(8, 8), 0)


@in_the_simulator
def test_no_read_of_a_tile_waits_for_a_bank():
    def turns(starts, width):
        words = {start + i for start in starts for i in range(width)}
        return max(sum(word % 32 == bank for word in words) for bank in range(32))

    for chunk in range(8):  # of a K-major tile: ldmatrix reads 16 bytes of every second row of 16
        for first in (0, 1):
            assert turns([32 * row + 4 * swizzle(row, chunk) for row in range(first, 16, 2)], 4) == 1
    for half in (range(4), range(4, 8)):  # of an M-major tile: 16 lanes read 8 bytes each
        assert turns([t * (128 + PAD) + 2 * g for g in half for t in range(4)], 2) == 1


PRODUCTS = {  # how to multiply, and the error
    "fp32": (partial(engine.multiply, tf32=0), 1e-5),
    "tf32": (engine.multiply, 2e-3),
    "3xtf32": (partial(engine.multiply, tf32=3), 1e-6),
    "wgmma": (wgmma.multiply, 2e-3),
    "tma": (tma.multiply, 2e-3),
    "tma-3xtf32": (partial(tma.multiply, tf32=3), 1e-6),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("N", "C", "OC"), [(3, 8, 50260), (4100, 768, 772), (1000, 3072, 768)])
def test_edges_and_splits_are_right_on_the_gpu(name, N, C, OC):
    if name in ("wgmma", "tma", "tma-3xtf32") and (reason := wgmma.missing()):
        pytest.skip(reason)
    multiply, limit = PRODUCTS[name]
    inp, weight, out = normal(N, C), normal(OC, C), to_device(np.full((N, OC), np.nan, np.float32))
    multiply(out, to_device(inp), to_device(weight))
    assert relative_error(to_host(out), inp.astype(np.float64) @ weight.T) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("core", "a_m_major", "b_m_major"), [
    (engine, False, False), (engine, False, True), (engine, True, True), (tma, False, False), (tma, True, False),
])  # fmt: skip
def test_three_products_keep_the_digits_of_a_long_sum(core, a_m_major, b_m_major):
    """Positive factors: all that is cut off, at an addition or of a factor, has one sign, and adds up."""
    if core is tma and (reason := wgmma.missing()):
        pytest.skip(reason)
    a, b = abs(normal(100, 16384)), abs(normal(200, 16384))
    out = to_device(np.full((100, 200), np.nan, np.float32))
    lie = lambda x, m_major: to_device(np.ascontiguousarray(x.T) if m_major else x)  # noqa: E731
    layout = {"a_m_major": a_m_major} | ({"b_m_major": b_m_major} if core is engine else {})
    core.multiply(out, lie(a, a_m_major), lie(b, b_m_major), tf32=3, splits=1, **layout)
    assert relative_error(to_host(out), a.astype(np.float64) @ b.T) < 2e-6


# ---- compiled, with no GPU ----


def compile_core(core: str) -> str:
    """The PTX for an H100 of the kernel that the model's shapes get."""
    from kernels.compile import compile_launches

    inp, weight, out = (np.empty((256, 256), np.float32) for _ in range(3))
    launch = {
        "fp32": lambda: engine.multiply(out, inp, weight, tile=engine.FP32_TILES[0], splits=1),
        "tf32": lambda: engine.multiply(out, inp, weight, tile=engine.TF32_TILES[0], splits=1),
        "3xtf32": lambda: engine.multiply(out, inp, weight, tile=engine.THREE_PRODUCTS_TILES[0], splits=1),
        "wgmma": lambda: wgmma.multiply(out, inp, weight, tile=wgmma.Tile(), splits=1),
        "tma": lambda: tma.multiply(out, inp, weight, tile=tma.Tile(), splits=1),
        "tma-3xtf32": lambda: tma.multiply(out, inp, weight, tile=tma.Tile(128, tf32=3), splits=1),
    }
    return compile_launches(launch[core], [(9, 0)])[9, 0][0][1]


@pytest.mark.parametrize(
    ("core", "instruction", "count"),
    [
        ("fp32", "fma.rn", 512), ("tf32", "mma.sync", 128), ("3xtf32", "mma.sync", 192),
        ("wgmma", "wgmma.mma", 8), ("tma", "wgmma.mma", 8), ("tma-3xtf32", "wgmma.mma", 24),
    ],
)
def test_the_sums_stay_in_registers(core, instruction, count, compiler):
    ptx = compiler.submit(compile_core, core).result()
    assert ".local" not in ptx, "an array has left its registers"
    assert ptx.count(instruction) >= count
