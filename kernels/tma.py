"""Hopper's tensor memory accelerator: one thread asks for a whole tile, a machine of its own brings it to shared memory.

What lies where in memory, and which part of it a tile is, stands in a *tensor map*, made on the host. A tile's rows are 128
bytes, 32 float32, and arrive swizzled as wgmma wants them: the 16-byte chunk c of row r stands at c ^ (r % 8). What lies outside
of the tensor arrives as zeros.

Whether a tile is there is told by a *barrier in shared memory*, 8 bytes. Its phase ends when as many threads have arrived as it
was made for, and as many bytes as they have announced. The phases count 0, 1, 0, ...: who waits names the parity of the phase
whose end he waits for, so that a wait for the 1 before the first 0 is over at once.

A *cluster* is a few blocks that run at the same time on neighbouring multiprocessors. A copy can be sent to all of them at once,
and they can arrive at one another's barriers. (The simulator runs a block at a time: clusters of one.)

All of this needs compute capability 9.0. (PTX ISA: Tensors; mbarrier; cp.async.bulk.tensor; Cluster)
"""

import ctypes
import functools

import numpy as np

from kernels import simulator
from kernels.device import SIMULATE, TARGET, int32, to_device
from kernels.intrinsics import GLOBAL, LITERAL, SHARED, ptx

WORDS = 16  # uint64 of a tensor map
ROW = 32  # float32 of a row of a tile


# Tensor maps, on the host ---------------------------------------------------------------------------------------------


@functools.cache
def tensor_maps(*maps: tuple):
    """A device array with one map after the other, each told by (address, sizes, strides, box, rounded): of a float32 tensor, the
    fastest dimension first, the strides (of all but the first) in elements and multiples of 4. The box is what a copy moves, 32
    by up to 256 in each other dimension; if `rounded`, its elements are rounded to TF32 on the way."""
    return to_device(np.concatenate([np.array(_encode(*one), np.uint64) for one in maps]))


def _encode(address: int, sizes: tuple, strides: tuple, box: tuple, rounded: bool) -> list[int]:
    if TARGET != "gpu":  # for the simulator's copies
        words = [address, rounded, len(sizes), *sizes, *strides, *box]
        return words + [0] * (WORDS - len(words))
    from cuda.bindings import driver

    long, short, kinds = driver.cuuint64_t, driver.cuuint32_t, driver.CUtensorMapDataType
    error, tensor_map = driver.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 if rounded else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        len(sizes),
        address,
        [long(size) for size in sizes],
        [long(4 * stride) for stride in strides],
        [short(size) for size in box],
        [short(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a tensor map of sizes {sizes}, strides {strides}, box {box}: {error.name}")
    return [int(word) for word in tensor_map.opaque]


# Barriers in shared memory --------------------------------------------------------------------------------------------


@ptx("mbarrier.init.shared::cta.b64 [$0], $1;", takes=(SHARED, int32))
def mbarrier_init(barriers, i, count):
    """Make barriers[i], of uint64, a barrier for `count` arrivals. Others see it after fence_mbarrier_init, and a barrier."""
    simulator.block_state()[_place(barriers, i)] = _Barrier(count)


@ptx("fence.mbarrier_init.release.cluster;")
def fence_mbarrier_init():
    """What this thread has initialized, the cluster and the copies see after the next cluster_sync."""


@ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", takes=(SHARED, int32))
def mbarrier_expect(barriers, i, nbytes):
    """Arrive, and announce that so many bytes will."""
    _barrier(barriers, i).arrive(nbytes)


@ptx(
    "{.reg .b32 a; mapa.shared::cluster.u32 a, $0, $1; mbarrier.arrive.shared::cluster.b64 _, [a];}",
    takes=(SHARED, int32),
)
def mbarrier_arrive(barriers, i, rank):
    """Arrive at this barrier of the block of this rank in the cluster."""
    _barrier(barriers, i).arrive()


@ptx(
    "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra WAIT;}",
    takes=(SHARED, int32),
)
def mbarrier_wait(barriers, i, parity):
    """Wait for the end of the phase of this parity."""
    _barrier(barriers, i).wait(parity)


def _place(barriers, i) -> tuple:
    barriers.flat_at(i, 1)
    if not simulator.is_shared(barriers):
        raise simulator.SimulatorError("a barrier lies in shared memory")
    return "mbarrier", barriers.flat[1] + 8 * i


def _barrier(barriers, i) -> "_Barrier":
    place = _place(barriers, i)
    if place not in simulator.block_state():
        raise simulator.SimulatorError(f"barrier {i} was not initialized")
    return simulator.block_state()[place]


class _Barrier:
    """The simulator's. Tiles arrive as late as they may: when somebody waits for them."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.bytes = 0  # announced, less those that have come
        self.parity = 0  # of the phase under way
        self.tiles: list[tuple] = []  # (where to, what), that have come
        self.waiting: list = []

    def is_over(self) -> bool:
        return self.missing == 0 and self.bytes == 0

    def end(self) -> None:
        """Begin the next phase."""
        for target, tile in self.tiles:
            target[:] = tile
        simulator.wake(self.waiting)
        self.missing, self.parity, self.tiles, self.waiting = self.count, 1 - self.parity, [], []

    def arrive(self, nbytes: int = 0) -> None:
        if self.is_over():
            self.end()
        if self.missing == 0:
            raise simulator.SimulatorError(f"a barrier for {self.count} arrivals has seen one more")
        self.missing -= 1
        self.bytes += nbytes
        self.tell()

    def bring(self, target: np.ndarray, tile: np.ndarray) -> None:
        self.bytes -= tile.nbytes
        self.tiles.append((target, tile))
        self.tell()

    def tell(self) -> None:
        if self.waiting and self.is_over():
            self.end()

    def wait(self, parity: int) -> None:
        if self.is_over():
            self.end()
        if self.parity == parity:
            self.waiting.append(simulator.running())
            simulator.sleep("mbarrier_wait")


# Copies of tiles ------------------------------------------------------------------------------------------------------

_COPY = "cp.async.bulk.tensor.%s.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


@ptx(_COPY % "2d" + " [$0], [$1, {$2, $3}], [$4];", takes=(SHARED, GLOBAL, int32, int32, SHARED))
def copy_tile2(shared, at, maps, j, x, y, barriers, i):
    """Start to copy the box at (x, y) of the two-dimensional tensor whose map stands at maps[j:] to shared[at:], a multiple
    of 1024 bytes. Its bytes arrive at barriers[i]. By one thread."""
    _copy_tile(shared, at, maps, j, (x, y), barriers, i)


@ptx(
    "{.reg .b16 m; cvt.u16.u32 m, $6; %s.multicast::cluster [$0], [$1, {$2, $3, $4}], [$5], m;}" % (_COPY % "3d"),
    takes=(SHARED, GLOBAL, int32, int32, int32, SHARED, int32),
)
def copy_tile3(shared, at, maps, j, x, y, z, barriers, i, ranks):
    """The same of three dimensions, to every block of the cluster whose rank's bit is set in `ranks`: to the same place of its
    shared memory, the bytes arriving at its own barriers[i]."""
    if ranks != 1:
        raise simulator.SimulatorError(f"copy_tile3 to the ranks {ranks:#b}: a cluster is one block here")
    _copy_tile(shared, at, maps, j, (x, y, z), barriers, i)


def _copy_tile(shared, at, maps, j, start, barriers, i):
    source, index, rounded = _box(maps, j, start)
    tile = np.where(index >= 0, source[index], np.float32(0))
    bits = tile.view(np.uint32)
    if rounded:
        tile = np.where(np.isfinite(tile), bits + np.uint32(0x1000) & np.uint32(0xFFFFE000), bits).view(np.float32)
    _barrier(barriers, i).bring(_tile(shared, at, tile.size), tile[_swizzled(tile.size)])


def _box(maps, j, start) -> tuple[np.ndarray, np.ndarray, int]:
    """What a map's tensor lies in, for each element of the box at `start` its index there or -1, and whether to round."""
    address, rounded, rank, *words = (int(word) for word in maps.data[j : j + WORDS])
    sizes, strides, box = words[:rank], [1, *words[rank : 2 * rank - 1]], words[2 * rank - 1 : 3 * rank - 1]
    length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    index, inside = np.zeros(1, np.int64), np.ones(1, bool)
    for first, count, size, stride in reversed(list(zip(start, box, sizes, strides, strict=True))):
        place = first + np.arange(count)
        index, inside = index[:, None] + place * stride, inside[:, None] & (0 <= place) & (place < size)
        index, inside = index.ravel(), inside.ravel()
    return np.ctypeslib.as_array((ctypes.c_float * length).from_address(address)), np.where(inside, index, -1), rounded


def _tile(shared, at, size) -> np.ndarray:
    flat = shared.flat_at(at + size - 4, 4)
    if not simulator.is_shared(shared) or at % 256:
        raise simulator.SimulatorError(f"a tile starts at a multiple of 1024 bytes of shared memory, not at element {at}")
    return flat[at : at + size]


def _swizzled(size: int) -> np.ndarray:
    """For each place of a tile the element that stands there."""
    place = np.arange(size)
    return place ^ place // ROW % 8 * 4


# Registers ------------------------------------------------------------------------------------------------------------


@ptx("setmaxnreg.inc.sync.aligned.u32 $0;", takes=(LITERAL,))
def take_registers(count):
    """Let each thread of this warp group have so many registers, a literal and a multiple of 8, of those that others gave up."""


@ptx("setmaxnreg.dec.sync.aligned.u32 $0;", takes=(LITERAL,))
def give_registers(count):
    """The reverse: this warp group goes on with fewer."""


# Clusters -------------------------------------------------------------------------------------------------------------


def make_in_clusters():
    if SIMULATE:
        return lambda size: None
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.core.errors import RequireLiteralValue
    from numba.cuda.extending import intrinsic

    @intrinsic
    def in_clusters(typing_context, size):
        if not isinstance(size, types.IntegerLiteral):
            raise RequireLiteralValue("in_clusters takes a literal integer, or a constant of the module")

        def generate(context, builder, signature, args):
            module, name = builder.module, ir.MetaDataString(builder.module, "cluster_dim_x")
            fact = module.add_metadata((builder.function, name, ir.Constant(ir.IntType(32), size.literal_value)))
            cgutils.get_or_insert_named_metadata(module, "nvvm.annotations").add(fact)
            return context.get_dummy_value()

        return types.none(size), generate

    return in_clusters


in_clusters = make_in_clusters()
"""in_clusters(size): a statement of a kernel (not of a device function). Its blocks run in clusters of so many, a literal;
the grid is a multiple of it. No instruction: a directive of the kernel, .reqnctapercluster."""


@ptx("mov.u32 $0, %cluster_ctarank;", returns=int32, pure=True)
def cluster_rank():
    """The number of this block in its cluster."""
    return 0


@ptx("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", collective=True)
def cluster_sync():
    """A barrier of all threads of the cluster; warps come to it whole. (arrive releases and wait acquires memory)"""
    simulator.cuda.syncthreads()
