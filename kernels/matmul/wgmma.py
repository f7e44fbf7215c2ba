"""The engine of version 12: Hopper's tensor cores, which four warps work together and which read b from shared memory themselves.

    out (M,N) = a @ b, where a is (M,K) or, if a_m_major, (K,M) read as its transpose; and b.T is (N,K)

wgmma.mma_async.m64nBNk8 adds a 64 x 8 by 8 x BN product to sums in the registers of a warp group, 128 threads. It takes a from
registers, so that a may lie either way round and is rounded to nearest; b it reads from shared memory, K-major, cut off to TF32.
It runs on while its warps go on: to the next fragment of a, and to the copies of the stages that come after.
"""

import functools

import numpy as np

from kernels import simulator
from kernels.device import (
    SIMULATE, big_shared, ceil_div, cp_async16_zfill, cp_async_commit, cp_async_wait, cuda, float32, int32, int64, ldmatrix_x4,
)  # fmt: skip
from kernels.intrinsics import LITERAL, ptx
from kernels.matmul.engine import BK, GROUP, PAD, STORE, round_tf32, store_one

BM, STAGES, THREADS = 128, 4, 256
A_ROW = BM + PAD
A_SIZE = -(-BK * A_ROW // 256) * 256  # floats of a stage: whole kilobytes, so that b's tile starts at one


@ptx("fence.proxy.async.shared::cta;")
def fence_async():
    """What this thread has written to shared memory, wgmma sees from here on (after a barrier). (PTX ISA, async proxy)"""


@ptx("wgmma.fence.sync.aligned;")
def wgmma_fence():
    """Before the first wgmma that uses registers which were just written. (PTX ISA, wgmma.fence)"""


@ptx("wgmma.commit_group.sync.aligned;")
def wgmma_commit():
    """Bind the wgmmas since the last commit into a group. (PTX ISA, wgmma.commit_group)"""


@ptx("wgmma.wait_group.sync.aligned $0;", takes=(LITERAL,))
def wgmma_wait(n):
    """Wait until at most n groups are under way. (PTX ISA, wgmma.wait_group)"""


@functools.cache
def make_wgmma(N: int):
    """sums (N // 2) = a @ b, plus sums if `more`, for a warp group: wgmma(sums, shared, at, more, a0, a1, a2, a3); and
    wgmma_finish(sums): wait until the sums are there.

    b.T's N rows of 8 floats start at shared[at], in a tile with rows of 128 bytes whose 16-byte chunk c stands at c ^ (row % 8);
    at is a multiple of 8 within a row, and the tile starts at a multiple of 1024 bytes. Lane 4 g + t of warp w holds
        a0 = a[16 w + g, t], a1 = a[16 w + g + 8, t], a2 = a[16 w + g, t + 4], a3 = a[16 w + g + 8, t + 4]
        sums[4 j + c] = sums[16 w + g + 8 (c // 2), 8 j + 2 t + c % 2]
    (PTX ISA, Asynchronous Warpgroup Level Matrix Instructions)
    """
    count = N // 2
    if SIMULATE:
        return simulated_wgmma(count)

    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    names = ", ".join(f"${i}" for i in range(count))
    a = ", ".join(f"${2 * count + i}" for i in range(4))
    # the descriptor: address / 16, 1024 bytes between groups of eight rows, swizzled by 128 bytes
    multiply = (
        f"{{.reg .pred p; .reg .b32 x; .reg .b64 d; setp.ne.b32 p, ${2 * count + 5}, 0; shr.u32 x, ${2 * count + 4}, 4; cvt.u64.u32 d, x; or.b64 d, d, 0x4000004000010000; "
        f"wgmma.mma_async.sync.aligned.m64n{N}k8.f32.tf32.tf32 {{{names}}}, {{{a}}}, d, p, 1, 1;}}"
    )

    def through_registers(context, builder, sums, value, text, operands, constraints):
        """The assembly with all sums in registers, which it changes in place."""
        data = context.make_array(sums)(context, builder, value).data
        places = [builder.gep(data, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]
        operands = [*map(builder.load, places), *operands]
        result = ir.LiteralStructType([ir.FloatType()] * count)
        constraints = ["=f"] * count + [str(i) for i in range(count)] + constraints + ["~{memory}"]
        function = ir.FunctionType(result, [operand.type for operand in operands])
        values = builder.call(ir.InlineAsm(function, text, ",".join(constraints), side_effect=True), operands)
        for i, place in enumerate(places):
            builder.store(builder.extract_value(values, i), place)
        return context.get_dummy_value()

    @intrinsic
    def wgmma(typing_context, sums, shared, at, more, a0, a1, a2, a3):
        def generate(context, builder, signature, args):
            start = builder.gep(context.make_array(shared)(context, builder, args[1]).data, [args[2]])
            start = builder.ptrtoint(builder.addrspacecast(start, ir.PointerType(start.type.pointee, 3)), ir.IntType(32))
            a = [builder.bitcast(x, ir.IntType(32)) for x in args[4:]]
            return through_registers(context, builder, sums, args[0], multiply, [*a, start, args[3]], ["r"] * 6)

        return types.none(sums, shared, types.int64, types.int32, *[types.float32] * 4), generate

    @intrinsic
    def wgmma_finish(typing_context, sums):
        def generate(context, builder, signature, args):
            return through_registers(context, builder, sums, args[0], "wgmma.wait_group.sync.aligned 0;", [], [])

        return types.none(sums), generate

    return wgmma, wgmma_finish


def simulated_wgmma(count: int):
    def wgmma(sums, shared, at, more, a0, a1, a2, a3):
        thread = int(cuda.threadIdx.x)
        group = simulator.barrier(f"wgmma {thread // 128}", 128, (thread, a0, a1, a2, a3))
        if "product" not in group:
            a = np.empty((64, 8), np.float32)
            for thread_of, *values in list(group.values()):
                w, g, t = thread_of // 32 % 4, thread_of % 32 // 4, thread_of % 4
                a[16 * w + g, t], a[16 * w + g + 8, t], a[16 * w + g, t + 4], a[16 * w + g + 8, t + 4] = values
            rows = np.asarray(shared)[at - at % BK :][: 2 * count * BK].reshape(2 * count, 8, 4)
            chunks = (at % BK // 4 + np.arange(2))[None, :] ^ (np.arange(2 * count) % 8)[:, None]
            b = np.take_along_axis(rows, chunks[:, :, None], 1).reshape(2 * count, 8)
            cut = [np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000) for x in (a, b)]
            a, b = (x.view(np.float32).astype(np.float64) for x in cut)
            group["product"] = (a @ b.T).astype(np.float32)
        w, g, t = thread // 32 % 4, thread % 32 // 4, thread % 4
        for i in range(count):
            sums[i] = (sums[i] if more else 0) + group["product"][16 * w + g + 8 * (i % 4 // 2), i // 4 * 8 + 2 * t + i % 2]

    return wgmma, lambda sums: None


@functools.cache
def kernel(BN: int, a_m_major: bool, epilogue: int, transposed: bool):
    """transposed: out is (N,M), the transpose of what is computed."""
    STAGE, SUMS, AHEAD = A_SIZE + BN * BK, BN // 2, STAGES - 3
    wgmma, wgmma_finish = make_wgmma(BN)
    store = store_one(epilogue)

    @cuda.jit(device=True)
    def copy_a(shared, at, a, first, k, M, K):
        thread = int32(cuda.threadIdx.x)
        if a_m_major:
            step, column = thread >> 5, (thread & 31) * 4
            start = int64(k + step) * M + (first + column)
            for i in range(4):
                cp_async16_zfill(
                    shared, at + (step + 8 * i) * A_ROW + column, a, start + 8 * i * M, k + step + 8 * i < K and first + column < M
                )
        else:
            copy_rows(shared, at, a, first, k, M, K, 4)

    @cuda.jit(device=True)
    def copy_rows(shared, at, source, first, k, count, K, passes):
        """source (count, K): 32 rows a pass."""
        thread = int32(cuda.threadIdx.x)
        row, chunk = thread >> 3, thread & 7
        start = int64(first + row) * K + (k + 4 * chunk)
        to = at + row * BK + 4 * (chunk ^ (row & 7))
        for i in range(passes):
            cp_async16_zfill(
                shared, to + 32 * i * BK, source, start + 32 * i * K, first + row + 32 * i < count and k + 4 * chunk < K
            )

    @cuda.jit(device=True)
    def read_a(fragment, shared, at, row, lane):
        g, t = lane >> 2, lane & 3
        for s in range(4):
            if a_m_major:
                start = at + (8 * s + t) * A_ROW + row + g
                x0, x1 = shared[start], shared[start + 8]
                x2, x3 = shared[start + 4 * A_ROW], shared[start + 4 * A_ROW + 8]
            else:
                r = row + (lane & 15)
                x0, x1, x2, x3 = ldmatrix_x4(shared, at + r * BK + 4 * ((2 * s + (lane >> 4)) ^ (r & 7)))
            fragment[s, 0] = round_tf32(x0)
            fragment[s, 1] = round_tf32(x1)
            fragment[s, 2] = round_tf32(x2)
            fragment[s, 3] = round_tf32(x3)

    @cuda.jit(device=True)
    def step(sums, fragment, shared, now, next, a, b, first_row, first_column, k, M, N, K, more):
        """Multiply the tile of this step while copies bring the tile of the step after the next."""
        cp_async_wait(AHEAD)
        fence_async()
        cuda.syncthreads()  # this step's tile is there; all have done the step before last, whose place is free
        copy_a(shared, next + BN * BK, a, first_row, k + (STAGES - 2) * BK, M, K)
        copy_rows(shared, next, b, first_column, k + (STAGES - 2) * BK, N, K, BN // 32)
        cp_async_commit()
        read_a(fragment, shared, now + BN * BK, int32(cuda.threadIdx.x) >> 5 << 4, int32(cuda.threadIdx.x) & 31)
        wgmma_fence()
        wgmma(sums, shared, now, more, fragment[0, 0], fragment[0, 1], fragment[0, 2], fragment[0, 3])
        for s in range(1, 4):
            wgmma(sums, shared, now + 8 * s, 1, fragment[s, 0], fragment[s, 1], fragment[s, 2], fragment[s, 3])
        wgmma_commit()
        wgmma_wait(1)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 1))
    def matmul_wgmma_kernel(out, a, b, bias, extra, M, N, K):
        shared = cuda.shared.array(0, float32, alignment=1024)
        sums = cuda.local.array(SUMS, float32)
        even = cuda.local.array((4, 4), float32)
        odd = cuda.local.array((4, 4), float32)
        thread = int32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        block = int32(cuda.blockIdx.x)
        across = (N + int32(BN - 1)) // int32(BN)
        top = block // (GROUP * across) * GROUP
        height = min((M + int32(BM - 1)) // int32(BM) - top, GROUP)
        first_row = (top + block % (GROUP * across) % height) * BM
        first_column = block % (GROUP * across) // height * BN

        for stage in range(STAGES - 2):
            copy_a(shared, stage * STAGE + BN * BK, a, first_row, stage * BK, M, K)
            copy_rows(shared, stage * STAGE, b, first_column, stage * BK, N, K, BN // 32)
            cp_async_commit()
        # two fragments of a by turns: wgmma still reads the one while the other is loaded
        step(sums, even, shared, int32(0), int32((STAGES - 2) * STAGE), a, b, first_row, first_column, int32(0), M, N, K, 0)
        step(sums, odd, shared, int32(STAGE), int32((STAGES - 1) * STAGE), a, b, first_row, first_column, int32(BK), M, N, K, 1)
        for k in range(int32(2 * BK), K, int32(2 * BK)):
            now = k // (2 * BK) % 2 * (2 * STAGE)
            next = 2 * STAGE - now
            step(sums, even, shared, now, next, a, b, first_row, first_column, k, M, N, K, 1)
            step(sums, odd, shared, now + STAGE, next + STAGE, a, b, first_row, first_column, k + BK, M, N, K, 1)
        wgmma_finish(sums)
        for j in range(BN // 8):
            for i in range(2):
                row, column = first_row + 16 * warp + (lane >> 2) + 8 * i, first_column + 8 * j + 2 * (lane & 3)
                for c in range(2):
                    if row < M and column + c < N:
                        if transposed:
                            store(out, bias, extra, column + c, row, M, sums[4 * j + 2 * i + c])
                        else:
                            store(out, bias, extra, row, column + c, N, sums[4 * j + 2 * i + c])

    return matmul_wgmma_kernel


def shared_bytes(BN: int) -> int:
    return 4 * STAGES * (A_SIZE + BN * BK)


def multiply(out, a, b, *, BN=192, a_m_major=False, epilogue=STORE, bias=None, extra=None, transposed=False, stream=0):
    M, K = a.shape[::-1] if a_m_major else a.shape
    N = b.shape[0]
    bias, extra = out if bias is None else bias, out if extra is None else extra
    launch = big_shared(
        kernel(BN, a_m_major, epilogue, transposed), ceil_div(M, BM) * ceil_div(N, BN), THREADS, stream, shared_bytes(BN)
    )
    launch(out, a, b, bias, extra, int32(M), int32(N), int32(K))
