"""The fused classifier: the loss of every row and the logits' gradient, in place of the logits.

    losses = -log softmax(logits)[target]         logits <- (softmax(logits) - onehot(target)) * dloss

over the V columns of the vocabulary; the Vp - V columns of padding are never read, and are written zero.

The story is told in doc/classifier.md.

version 1: a thread a row
version 2: a block a row, so that neighbouring threads read neighbouring columns; the row is read three times
version 3: maximum and sum in one pass, online: the row is read twice
version 4: 16-byte loads, four in flight a thread; the second reading goes backwards, and finds what L2 still holds
version 5: the row stays in shared memory, and is read once; blocks stay too: where a piece of the row has been written,
           a copy of the next row's piece is started
version 6: the row stays in registers, where its exponentials can stay as well: one a logit, not two and a quarter
"""

import functools
import math

import numpy as np

import cpu_reference
from kernels.device import (
    big_shared,
    ceil_div,
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    cuda,
    exp2_approx,
    float32,
    float64,
    load4,
    multiprocessors,
    shared_limit,
    store4,
    store4_streaming,
)  # fmt: skip
from kernels.op import Op
from kernels.reduce import (
    LN2,
    LOG2E,
    LOWEST,
    block_max,
    block_online,
    block_sum,
    online_add,
    online_add4,
    power,
    whole_warps,
)


def classifier_inputs(rng, N, V, Vp):
    logits = rng.standard_normal((N, Vp), dtype=np.float32)
    logits[:, V:] = np.nan
    return {
        "logits": logits,
        "dloss": 1.0 / N,
        "targets": rng.integers(0, V, N).astype(np.int32),
        "V": V,
    }


fused_classifier = Op(
    reference=cpu_reference.fused_classifier,
    inputs=classifier_inputs,
    outputs=lambda N, V, Vp: {"losses": N},
    changed=("logits",),
    bytes_moved=lambda N, V, Vp: 4 * N * (V + Vp),
    shape={"N": 4096, "V": 50257, "Vp": 50304},
    small={"N": 3, "V": 97, "Vp": 128},
    odd=[
        {"N": N, "V": V, "Vp": Vp}
        for N, V, Vp in (
            *((1, 1, 1), (1, 1, 4), (1, 33, 33), (1, 100, 101)),
            *((1, 1024, 1024), (5, 4097, 4100), (1, 2048, 4200)),
        )
    ],
    large=[{"N": 8192, "V": 50257, "Vp": 50304}],
)


@cuda.jit(cache=True, fastmath=True)
def fused_classifier_kernel1(logits, losses, dloss, targets, V):
    row = cuda.grid(1)
    N, Vp = logits.shape
    if row < N:
        largest = LOWEST
        for v in range(V):
            largest = max(largest, logits[row, v])
        total = float64(0)  # in float32, so many additions one after the other lose what is small
        for v in range(V):
            total += math.exp(logits[row, v] - largest)
        target = targets[row]
        losses[row] = math.log(total) - (logits[row, target] - largest)
        norm, scale = float32(1 / total), float32(dloss)
        for v in range(V):
            prob = math.exp(logits[row, v] - largest) * norm
            logits[row, v] = (prob - float32(1 if v == target else 0)) * scale
        for v in range(V, Vp):
            logits[row, v] = float32(0)


@fused_classifier.version(1, "a thread a row")
def fused_classifier1(logits, losses, dloss, targets, V, *, block_size=128, stream=0):
    """logits: float32 (N, Vp); losses: (N,); dloss: a float, 1/N for the mean's gradient; targets: int32 (N,) below V."""
    blocks = ceil_div(logits.shape[0], block_size)
    fused_classifier_kernel1[blocks, block_size, stream](logits, losses, dloss, targets, V)


@cuda.jit(cache=True, fastmath=True)
def fused_classifier_kernel2(logits, losses, dloss, targets, V):
    row, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    Vp = logits.shape[1]
    largest = LOWEST
    for v in range(thread, V, threads):
        largest = max(largest, logits[row, v])
    largest = block_max(largest)
    total = float32(0)
    for v in range(thread, V, threads):
        total += math.exp(logits[row, v] - largest)
    target = targets[row]
    target_logit = logits[row, target]  # before the barrier in block_sum: after it somebody overwrites it
    total = block_sum(total)
    if thread == 0:
        losses[row] = math.log(total) - (target_logit - largest)
    scale = float32(dloss)
    for v in range(thread, V, threads):
        prob = math.exp(logits[row, v] - largest) / total
        logits[row, v] = (prob - float32(1 if v == target else 0)) * scale
    for v in range(V + thread, Vp, threads):
        logits[row, v] = float32(0)


@fused_classifier.version(2, "a block a row: maximum, sum and gradient, a pass each")
def fused_classifier2(logits, losses, dloss, targets, V, *, block_size=1024, stream=0):
    whole_warps(block_size)
    fused_classifier_kernel2[logits.shape[0], block_size, stream](logits, losses, dloss, targets, V)


@cuda.jit(cache=True, fastmath=True)
def fused_classifier_kernel3(logits, losses, dloss, targets, V):
    row, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    Vp = logits.shape[1]
    top, total = LOWEST, float32(0)
    for v in range(thread, V, threads):
        top, total = online_add(top, total, logits[row, v])
    target = targets[row]
    target_logit = logits[row, target]
    top, total = block_online(top, total)
    if thread == 0:
        losses[row] = math.log(total) - LN2 * cuda.fma(LOG2E, target_logit, -top)
    scale = float32(dloss)
    norm = scale / total
    for v in range(thread, V, threads):
        logits[row, v] = power(logits[row, v], top) * norm - (scale if v == target else float32(0))
    for v in range(V + thread, Vp, threads):
        logits[row, v] = float32(0)


@fused_classifier.version(3, "maximum and sum in one pass, online; powers of 2 by the fast instruction")
def fused_classifier3(logits, losses, dloss, targets, V, *, block_size=1024, stream=0):
    whole_warps(block_size)
    fused_classifier_kernel3[logits.shape[0], block_size, stream](logits, losses, dloss, targets, V)


# From here on a row is 16-byte pieces: thread t has the pieces t, t + threads, ... The one piece that is partly logits
# and partly padding is read an element at a time.


@cuda.jit(device=True, cache=True)
def load_piece(logits, row, v, V):
    """Four logits of the row from column v on; LOWEST in place of padding, so that its power of 2 is zero."""
    if v + 3 < V:
        return load4(logits, row * logits.shape[1] + v)
    a = logits[row, v] if v < V else LOWEST
    b = logits[row, v + 1] if v + 1 < V else LOWEST
    c = logits[row, v + 2] if v + 2 < V else LOWEST
    return a, b, c, LOWEST


@cuda.jit(device=True, cache=True, fastmath=True)
def finish_target(logits, losses, row, target, target_logit, top, total, scale):
    """What is special about the target's column: the loss, and the gradient, which has to follow its neighbours' and so is
    written by the thread that has just written their piece."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    if thread == (target >> 2) % threads:
        logits[row, target] = power(target_logit, top) * (scale / total) - scale
    if thread == 0:
        losses[row] = math.log(total) - LN2 * cuda.fma(LOG2E, target_logit, -top)


@cuda.jit(cache=True, fastmath=True)
def fused_classifier_kernel4(logits, losses, dloss, targets, V):
    row, step = cuda.blockIdx.x, 4 * cuda.blockDim.x
    Vp = logits.shape[1]
    x = cuda.local.array((4, 4), float32)
    base, first = row * Vp, 4 * cuda.threadIdx.x
    rounds = V // (4 * step) * 4 * step  # where rounds of four pieces a thread end
    target = targets[row]
    target_logit = logits[row, target]
    top, total = LOWEST, float32(0)
    v = first
    while v < rounds:
        for k in range(4):  # all four loads are under way before the first is needed
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(logits, base + v + k * step)
        for k in range(4):
            top, total = online_add4(top, total, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
        v += 4 * step
    while v < V:
        a, b, c, d = load_piece(logits, row, v, V)
        top, total = online_add4(top, total, a, b, c, d)
        v += step
    top, total = block_online(top, total)
    scale = float32(dloss)
    norm = scale / total
    v = rounds + first
    while v < Vp:
        a, b, c, d = load_piece(logits, row, v, V)
        store_gradient(logits, base + v, a, b, c, d, top, norm)
        v += step
    v = rounds + first - 4 * step
    while v >= 0:
        for k in range(4):
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(logits, base + v + k * step)
        for k in range(4):
            store_gradient(logits, base + v + k * step, x[k, 0], x[k, 1], x[k, 2], x[k, 3], top, norm)
        v -= 4 * step
    finish_target(logits, losses, row, target, target_logit, top, total, scale)


@cuda.jit(device=True, cache=True, fastmath=True)
def gradient(a, b, c, d, top, norm):
    return power(a, top) * norm, power(b, top) * norm, power(c, top) * norm, power(d, top) * norm


@cuda.jit(device=True, cache=True, fastmath=True)
def store_gradient(logits, i, a, b, c, d, top, norm):
    """Four logits become norm * 2**(logit - top) at element i."""
    store4_streaming(logits, i, *gradient(a, b, c, d, top, norm))


@fused_classifier.version(4, "16-byte loads, four in flight; read again backwards, from L2")
def fused_classifier4(logits, losses, dloss, targets, V, *, block_size=1024, stream=0):
    """Rows that are no multiple of 16 bytes go the way of version 3."""
    N, Vp = logits.shape
    if Vp % 4:
        fused_classifier3(logits, losses, dloss, targets, V, stream=stream)
        return
    whole_warps(block_size)
    fused_classifier_kernel4[N, block_size, stream](logits, losses, dloss, targets, V)


@cuda.jit(cache=True, fastmath=True, launch_bounds=(1024, 1))
def fused_classifier_kernel5(logits, losses, dloss, targets, V):
    shared = cuda.shared.array(0, float32)
    thread, first, step = cuda.threadIdx.x, 4 * cuda.threadIdx.x, 4 * cuda.blockDim.x
    N, Vp = logits.shape
    row, rows = cuda.blockIdx.x, cuda.gridDim.x
    whole = V & ~3  # where pieces without padding end
    v = first
    while v < Vp:
        if v < whole:
            cp_async16(shared, v, logits, row * Vp + v)
        else:
            store4(shared, v, LOWEST, LOWEST, LOWEST, LOWEST)
        v += step
    target = targets[row]
    while row < N:
        base, next_base = row * Vp, (row + rows) * Vp
        more = row + rows < N
        ahead = whole if more else 0  # where the pieces end that the next row wants
        target_logit = logits[row, target]
        target_ahead = targets[row + rows] if more else target
        if thread == (whole >> 2) % cuda.blockDim.x:
            for v in range(whole, V):
                shared[v] = logits[row, v]
        cp_async_commit()
        cp_async_wait(0)  # a thread reads what it has copied itself: no barrier
        top, total = LOWEST, float32(0)
        v = first
        while v < Vp:
            a, b, c, d = load4(shared, v)
            top, total = online_add4(top, total, a, b, c, d)
            v += step
        top, total = block_online(top, total)
        scale = float32(dloss)
        norm = scale / total
        v = first
        while v < Vp:
            a, b, c, d = load4(shared, v)
            store4(logits, base + v, *gradient(a, b, c, d, top, norm))
            if v < ahead:  # the piece's place is free
                cp_async16(shared, v, logits, next_base + v)
            v += step
        finish_target(logits, losses, row, target, target_logit, top, total, scale)
        row, target = row + rows, target_ahead


@fused_classifier.version(
    5, "the row in shared memory, read once; the next row follows as it is written", needs_cc=(8, 0)
)
def fused_classifier5(logits, losses, dloss, targets, V, *, block_size=1024, stream=0):
    """Rows that are no multiple of 16 bytes, or do not fit into shared memory, go the way of version 4."""
    N, Vp = logits.shape
    if Vp % 4 or 4 * Vp + 1024 > shared_limit():  # 1 KB for block_online and the driver
        fused_classifier4(logits, losses, dloss, targets, V, stream=stream)
        return
    whole_warps(block_size)
    blocks = min(N, multiprocessors())
    big_shared(fused_classifier_kernel5, blocks, block_size, stream, 4 * Vp)(logits, losses, dloss, targets, V)


THREADS6 = 512  # so that each has 128 registers: 100 of them hold its part of a row of GPT-2's vocabulary
PIECES6 = 25  # of 16 bytes, that fit there


@functools.cache
def make_fused_classifier_kernel6(V, Vp):
    """The kernel for rows of V logits padded to Vp. The compiler knows both: it unrolls the loops, and x becomes registers.

    The powers of 2 of a group of pieces refer to the group's top, so that the first are computed while the last pieces
    are on their way. All pieces but the last are whole for every thread.
    """
    step = 4 * THREADS6
    pieces = ceil_div(Vp, step)
    last = pieces - 1
    group = next((size for size in (5, 4, 6, 3) if pieces % size == 0), pieces)
    groups = pieces // group

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(THREADS6, 1))
    def fused_classifier_kernel6(logits, losses, dloss, targets):
        x = cuda.local.array((pieces, 4), float32)
        tops = cuda.local.array(groups, float32)
        first = 4 * cuda.threadIdx.x
        N = logits.shape[0]
        row, rows = cuda.blockIdx.x, cuda.gridDim.x
        for k in range(last):
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(logits, row * Vp + first + k * step)
        x[last, 0], x[last, 1], x[last, 2], x[last, 3] = load_piece(logits, row, first + last * step, V)
        target = targets[row]
        while row < N:
            base, next_row = row * Vp + first, row + rows
            next_base = next_row * Vp + first
            target_logit = logits[row, target]
            target_ahead = targets[next_row] if next_row < N else target
            top, total = LOWEST, float32(0)
            for g in range(groups):
                largest = LOWEST
                for k in range(g * group, g * group + group):
                    largest = max(largest, max(max(x[k, 0], x[k, 1]), max(x[k, 2], x[k, 3])))
                tops[g] = max(LOWEST, LOG2E * largest)  # with no column here, all powers are 0
                powers = float32(0)
                for k in range(g * group, g * group + group):
                    for j in range(4):
                        x[k, j] = power(x[k, j], tops[g])
                        powers += x[k, j]
                larger = max(top, tops[g])
                total = total * exp2_approx(top - larger) + powers * exp2_approx(tops[g] - larger)
                top = larger
            top, total = block_online(top, total)
            scale = float32(dloss)
            for g in range(groups):
                factor = exp2_approx(tops[g] - top) * (scale / total)
                for k in range(g * group, g * group + group):
                    for j in range(4):
                        x[k, j] *= factor
            for k in range(last):
                store4_streaming(logits, base + k * step, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
                if next_row < N:  # the piece's registers are free
                    x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(logits, next_base + k * step)
            if first + last * step < Vp:
                store4_streaming(logits, base + last * step, x[last, 0], x[last, 1], x[last, 2], x[last, 3])
            if next_row < N:
                x[last, 0], x[last, 1], x[last, 2], x[last, 3] = load_piece(logits, next_row, first + last * step, V)
            finish_target(logits, losses, row, target, target_logit, top, total, scale)
            row, target = next_row, target_ahead

    return fused_classifier_kernel6


@fused_classifier.version(6, "the row in registers, read once, and an exponential a logit")
def fused_classifier6(logits, losses, dloss, targets, V, *, stream=0):
    """Rows that are no multiple of 16 bytes, have no room in the registers of a block, or are padded by more than a piece
    a thread, go the way of version 4."""
    N, Vp = logits.shape
    pieces = ceil_div(Vp, 4 * THREADS6)
    if Vp % 4 or pieces > PIECES6 or V < 4 * THREADS6 * (pieces - 1):
        fused_classifier4(logits, losses, dloss, targets, V, stream=stream)
        return
    blocks = min(N, multiprocessors())
    make_fused_classifier_kernel6(V, Vp)[blocks, THREADS6, stream](logits, losses, dloss, targets)
