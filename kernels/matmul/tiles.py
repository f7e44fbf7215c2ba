"""A block's tile, and how its operands get to shared memory.

For the tensor cores K-major tiles stand there as they came, a row 128 bytes, their 16-byte chunks swizzled. M-major ones, and for
fp32 arithmetic both, lie k first, with padded rows. No read meets another in a bank.
"""

import functools
from dataclasses import dataclass

from kernels.device import ceil_div, cp_async4_zfill, cp_async16_zfill, cuda, int32, int64

BK = 32  # floats: a row of a K-major tile is 128 bytes, all banks once
PAD = 8  # floats between the rows of an M-major tile: lanes t = 0..3 read rows t, and must not meet in a bank
PAD_FP32 = 4  # with fp32 arithmetic it is the copies of 8 steps of 4 rows that must not


@dataclass(frozen=True)
class Tile:
    """Sizes that a kernel is compiled for."""

    BM: int = 128
    BN: int = 128
    WM: int = 64  # a multiple of 16
    WN: int = 64  # 32 or 64, on the tensor cores 48 as well
    stages: int = 3
    blocks: int = 2  # a multiprocessor holds
    tf32: int = 1  # products of TF32 that make one product: 0 is fp32 arithmetic, 3 gives its digits
    flops: float = 1e12  # a second, of a multiprocessor of an H200: what tiles are chosen by

    @property
    def threads(self) -> int:
        return 32 * (self.BM // self.WM) * (self.BN // self.WN)

    def size(self, rows: int, m_major: bool) -> int:
        """Floats of one stage of an operand's tile."""
        if not self.tf32:
            return BK * (rows + PAD_FP32)
        return BK * (rows + PAD) if m_major else BK * rows

    def shared(self, a_m_major: bool, b_m_major: bool) -> int:
        """Bytes of shared memory a block."""
        return 4 * self.stages * (self.size(self.BM, a_m_major) + self.size(self.BN, b_m_major))


@cuda.jit(device=True, cache=True)
def swizzle(row, chunk):
    """Where a row of a K-major tile keeps its chunk of 16 bytes, of eight. Of every second row of 16 all have another place:
    what ldmatrix reads at once fills 32 banks."""
    return chunk ^ (row >> 1) & 7


@functools.cache
def copy_tile(m_major: bool, rows: int, threads: int, aligned: bool, tf32: bool, parts: int, swizzle=swizzle):
    """A device function that starts to copy a part, 0 to parts - 1, of a tile of an operand, `rows` rows from `first` on and BK
    steps from k on, to shared[at:]. Steps from `end` on become zero. Rows from `count` on repeat the last one, for nobody will
    store what comes of them: that is cheaper than to ask."""
    steps = 1 << (threads * 4 // rows).bit_length() - 1  # of an M-major tile a pass
    passes = BK // steps if m_major else rows * BK // 4 // threads if tf32 else rows * 8 // threads
    PITCH = rows + (PAD if tf32 else PAD_FP32)
    ROWS = threads // 8  # of a K-major tile a pass

    @cuda.jit(device=True)
    def copy_k_major(shared, to, source, first, k, count, K, end, i):
        """source: (count, K)."""
        thread = int32(cuda.threadIdx.x)
        row, chunk = thread >> 3, thread & 7
        step = int32(k + 4 * chunk)
        start = int64(min(int32(first + row + i * ROWS), int32(count - 1))) * K + step
        to = int32(to + (row + i * ROWS) * BK + 4 * swizzle(row + i * ROWS, chunk))
        if aligned:
            cp_async16_zfill(shared, to, source, start, step < end)
        else:
            for j in range(4):
                cp_async4_zfill(shared, to + j, source, start + j, int32(step + j) < end)

    @cuda.jit(device=True)
    def copy_m_major(shared, to, source, first, k, count, K, end, i):
        """source: (K, count)."""
        thread = int32(cuda.threadIdx.x)
        row, column = thread // (rows // 4) + i * steps, thread % (rows // 4) * 4
        step, to = int32(k + row), int32(to + row * PITCH + column)
        column = int32(first + column)
        if steps * rows == threads * 4 or thread < steps * rows // 4:
            if aligned:
                cp_async16_zfill(shared, to, source, int64(step) * count + min(column, int32(count - 4)), step < end)
            else:
                for j in range(4):
                    at = min(int32(column + j), int32(count - 1))
                    cp_async4_zfill(shared, to + j, source, int64(step) * count + at, step < end)

    @cuda.jit(device=True)
    def copy_transposed(shared, to, source, first, k, count, K, end, i):
        """source: (count, K), kept as if it were M-major: 4 bytes a copy. A warp's are 8 steps of 4 rows, in 32 banks."""
        thread = int32(cuda.threadIdx.x)
        row, step = int32((thread >> 3) + i * ROWS), thread & 7
        to = int32(to + step * PITCH + row)
        step = int32(k + step)
        start = int64(min(int32(first + row), int32(count - 1))) * K + step
        for j in range(0, BK, 8):
            cp_async4_zfill(shared, to + j * PITCH, source, start + j, int32(step + j) < end)

    copy_pass = copy_m_major if m_major else copy_k_major if tf32 else copy_transposed
    EACH, WHOLE = ceil_div(passes, parts), passes % parts == 0

    @cuda.jit(device=True)
    def copy_part(shared, at, source, first, k, count, K, end, part):
        for j in range(EACH):
            i = int32(j * parts + part)
            if WHOLE or i < passes:
                copy_pass(shared, at, source, first, k, count, K, end, i)

    return copy_part
