"""Encoder backward: every row of dout is added to the row of dwte of its token and to the row of dwpe of its position.

version 1: a thread an element, with atomic additions, since a token can occur twice
version 2: a thread a channel, which walks down all rows: no atomics, but few threads
version 3: positions sorted by token, a block for each run of the same token: no atomics, and the same bits every time
version 4: 16-byte loads and stores
version 5: a radix sort that one block does while the others add up dwpe, and long runs shared out among blocks
version 6: atomics again, of 16 bytes, for dwte alone: everything in one kernel, and dout is read once
version 7: keys dealt into buckets, each sorted by a block of its own; dwpe beside the rows of dwte, which read dout again
"""

import numpy as np

import cpu_reference
from kernels.device import (
    FULL_MASK,
    WARP,
    atomic_add4,
    ceil_div,
    cuda,
    float32,
    int32,
    load4,
    load4_readonly,
    load4_streaming,
    need,
    scratch,
    store4,
)
from kernels.encoder.forward import encoder_forward, random_tokens, rows_touched, threads_of_row
from kernels.op import Op
from kernels.reduce import add4, warp_sum, whole_warps


def encoder_backward_inputs(rng, B, T, C, V, zipf):
    return {
        "dwte": rng.standard_normal((V, C), dtype=np.float32),
        "dwpe": rng.standard_normal((T, C), dtype=np.float32),
        "dout": rng.standard_normal((B, T, C), dtype=np.float32),
        "inp": random_tokens(rng, B, T, V, zipf),
    }


encoder_backward = Op(
    reference=cpu_reference.encoder_backward,
    inputs=encoder_backward_inputs,
    outputs=lambda B, T, C, V, zipf: {},
    changed=("dwte", "dwpe"),
    # dout read once, the rows of dwte and dwpe read and written
    bytes_moved=lambda B, T, C, V, zipf: 4 * (B * T * C + 2 * rows_touched(B, T, V, zipf) * C + 2 * T * C + B * T),
    shape=encoder_forward.shape,
    small=encoder_forward.small,
    odd=[
        *encoder_forward.odd,
        {"B": 2, "T": 20, "C": 4, "V": 1, "zipf": 0},
        {"B": 1, "T": 30, "C": 6, "V": 70000, "zipf": 1},
        {"B": 3, "T": 17, "C": 132, "V": 40, "zipf": 1},
    ],
    sizes=lambda given: {**dict(zip("BTC", given["dout"].shape, strict=True)), "V": len(given["dwte"]), "zipf": 1},
    trainer_shapes=encoder_forward.trainer_shapes,
    large=encoder_forward.large,
)


@cuda.jit(cache=True, fastmath=True)
def encoder_backward_kernel1(dwte, dwpe, dout, inp):
    B, T, C = dout.shape
    i = cuda.grid(1)
    if i < B * T * C:
        row, c = i // C, i % C
        b, t = row // T, row % T
        cuda.atomic.add(dwte, (inp[b, t], c), dout[b, t, c])
        cuda.atomic.add(dwpe, (t, c), dout[b, t, c])


@encoder_backward.version(1, "a thread an element, atomics (their order decides the last bits)", repeatable=False)
def encoder_backward1(dwte, dwpe, dout, inp, *, block_size=256, stream=0):
    """dwte: float32 (V, C) and dwpe: (maxT, C), added to; dout: (B, T, C); inp: int32 (B, T), on the device."""
    encoder_backward_kernel1[ceil_div(dout.size, block_size), block_size, stream](dwte, dwpe, dout, inp)


@cuda.jit(cache=True, fastmath=True)
def encoder_backward_kernel2(dwte, dwpe, dout, inp):
    B, T, C = dout.shape
    c = cuda.grid(1)
    if c < C:
        for b in range(B):
            for t in range(T):
                dwte[inp[b, t], c] += dout[b, t, c]
                dwpe[t, c] += dout[b, t, c]


@encoder_backward.version(2, "a thread a channel, no atomics")
def encoder_backward2(dwte, dwpe, dout, inp, *, block_size=32, stream=0):
    """dwte: float32 (V, C) and dwpe: (maxT, C), added to; dout: (B, T, C); inp: int32 (B, T), on the device."""
    encoder_backward_kernel2[ceil_div(dout.shape[2], block_size), block_size, stream](dwte, dwpe, dout, inp)


@cuda.jit(cache=True)
def order_by_token_kernel(order, tokens):
    """order (N,): the positions 0 to N-1 in the order of their tokens, equal ones in the order of the text. A warp counts how
    many come before its position, which is where the position goes."""
    i, lane = cuda.grid(1) // WARP, cuda.laneid
    if i < tokens.size:
        token = tokens[i]
        before = int32(0)
        for j in range(lane, tokens.size, WARP):
            if tokens[j] < token or (tokens[j] == token and j < i):
                before += int32(1)
        before = warp_sum(before)
        if lane == 0:
            order[before] = i


@cuda.jit(cache=True, fastmath=True)
def dwpe_kernel3(dwpe, dout):
    B, T, C = dout.shape
    i = cuda.grid(1)
    if i < T * C:
        t, c = i // C, i % C
        total = float32(0)
        for b in range(B):
            total += dout[b, t, c]
        dwpe[t, c] += total


@cuda.jit(cache=True, fastmath=True)
def dwte_kernel3(dwte, rows, tokens, order):
    C = rows.shape[1]
    first = cuda.blockIdx.x
    token = tokens[order[first]]
    if first == 0 or tokens[order[first - 1]] != token:  # a run of equal tokens begins: this block owns it
        for c in range(cuda.threadIdx.x, C, cuda.blockDim.x):
            total = float32(0)
            i = first
            while i < order.size and tokens[order[i]] == token:
                total += rows[order[i], c]
                i += 1
            dwte[token, c] += total


@encoder_backward.version(3, "positions sorted by token, a block for each run of equal tokens")
def encoder_backward3(dwte, dwpe, dout, inp, *, block_size=256, stream=0):
    """dwte: float32 (V, C) and dwpe: (maxT, C), added to; dout: (B, T, C); inp: int32 (B, T), on the device."""
    B, T, C = dout.shape
    order, tokens = scratch("encoder_backward3", B * T, np.int32), inp.reshape(B * T)
    order_by_token_kernel[ceil_div(B * T, whole_warps(block_size)), block_size, stream](order, tokens)
    dwpe_kernel3[ceil_div(T * C, block_size), block_size, stream](dwpe, dout)
    dwte_kernel3[B * T, block_size, stream](dwte, dout.reshape((B * T, C)), tokens, order)


FLIGHT = 8  # rows, of which a thread has its 16 bytes on the way


@cuda.jit(device=True, cache=True, fastmath=True)
def sum_of_rows(rows, i, step, count):
    """The sum of four neighbouring elements at i, i + step, i + 2 step, ..., `count` of them; eight independent loads at a time."""
    x = cuda.local.array((FLIGHT, 4), float32)
    total = float32(0), float32(0), float32(0), float32(0)
    while count > 0:
        for k in range(FLIGHT):
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = float32(0), float32(0), float32(0), float32(0)
            if k < count:
                x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(rows, i + k * step)
        for k in range(FLIGHT):
            total = add4(total, (x[k, 0], x[k, 1], x[k, 2], x[k, 3]))
        i += FLIGHT * step
        count -= FLIGHT
    return total


@cuda.jit(cache=True, fastmath=True)
def dwpe_kernel4(dwpe, dout):
    B, T, C = dout.shape
    i = 4 * cuda.grid(1)
    if i < T * C:
        store4(dwpe, i, *add4(load4(dwpe, i), sum_of_rows(dout, i, T * C, B)))


@cuda.jit(cache=True, fastmath=True)
def dwte_kernel4(dwte, dout, tokens, order):
    C = dout.shape[2]
    first = cuda.blockIdx.x
    token = tokens[order[first]]
    if first == 0 or tokens[order[first - 1]] != token:
        c = 4 * cuda.threadIdx.x
        while c < C:
            total = float32(0), float32(0), float32(0), float32(0)
            i = first
            while i < order.size and tokens[order[i]] == token:
                total = add4(total, load4_readonly(dout, order[i] * C + c))
                i += 1
            store4(dwte, token * C + c, *add4(load4(dwte, token * C + c), total))
            c += 4 * cuda.blockDim.x


@encoder_backward.version(4, "16-byte loads and stores")
def encoder_backward4(dwte, dwpe, dout, inp, *, block_size=256, stream=0):
    """As version 3, with C a multiple of 4."""
    B, T, C = dout.shape
    threads = threads_of_row(C, block_size)
    order, tokens = scratch("encoder_backward4", B * T, np.int32), inp.reshape(B * T)
    order_by_token_kernel[ceil_div(B * T, whole_warps(block_size)), block_size, stream](order, tokens)
    dwpe_kernel4[ceil_div(T * C, 4 * block_size), block_size, stream](dwpe, dout)
    dwte_kernel4[B * T, threads, stream](dwte, dout, tokens, order)


# Version 5 takes as many whole sequences at a time as one block can sort. A position becomes a key: its token above the
# POSITION_BITS of its place among these. `order` holds the sorted keys between neighbours that no token equals.
POSITION_BITS = 13
POSITIONS = 1 << POSITION_BITS
PADDING = (1 << 18) - 1  # a token, so that keys are positive int32
SORT_THREADS = 512
SORT_WARPS = SORT_THREADS // WARP
ROUNDS = POSITIONS // SORT_THREADS  # keys a thread
DIGITS = 256  # a pass of the sort looks at eight bits
WINDOW = 4  # keys a block of the second kernel
ROW_THREADS = 256  # of it, at most
LONG_RUN_CHANNELS = 4 * WARP  # a block of the third kernel
LONG_RUN_WARPS = 8
LONG_RUN_BLOCKS = 256  # for as many long runs at a time
NEIGHBOURHOOD = WINDOW + 2  # with a neighbour on either side


@cuda.jit(device=True, cache=True)
def sort_pass(keys, sorted_keys, counts, rounds, shift):
    """One pass of a stable radix sort (Knuth, The Art of Computer Programming 3, 5.2.5): by the eight bits above shift. A
    warp's keys stand before the next warp's, a round's before the next round's, a lane's before the next lane's."""
    lane, warp = cuda.laneid, cuda.threadIdx.x >> 5
    places = cuda.local.array(ROUNDS, int32)
    for digit in range(lane, DIGITS, WARP):
        counts[warp, digit] = 0
    cuda.syncwarp(FULL_MASK)
    for r in range(ROUNDS):  # where among the warp's keys of its digit does a key stand?
        if r < rounds:
            digit = int32(keys[r] >> shift & (DIGITS - 1))
            peers = cuda.match_any_sync(FULL_MASK, digit)
            lower = peers & ((1 << lane) - 1)
            places[r] = counts[warp, digit] + cuda.popc(lower)
            cuda.syncwarp(FULL_MASK)
            if lower == 0:
                counts[warp, digit] += cuda.popc(peers)
            cuda.syncwarp(FULL_MASK)
    cuda.syncthreads()
    digits_before(counts, sorted_keys)
    for r in range(ROUNDS):
        if r < rounds:
            digit = keys[r] >> shift & (DIGITS - 1)
            sorted_keys[counts[warp, digit] + places[r]] = keys[r]
    cuda.syncthreads()
    for r in range(ROUNDS):
        if r < rounds:
            keys[r] = sorted_keys[(warp * rounds + r) * WARP + lane]
    cuda.syncthreads()


@cuda.jit(device=True, cache=True)
def digits_before(counts, room):
    """counts[warp, digit] becomes the number of keys with a smaller digit, or the same in an earlier warp; room for one
    number a warp. A thread takes a digit."""
    tid, lane, warp = cuda.threadIdx.x, cuda.laneid, cuda.threadIdx.x >> 5
    own = int32(0)
    if tid < DIGITS:
        for w in range(SORT_WARPS):
            own += counts[w, tid]
    before = own  # of the digits of this warp's lanes up to this one
    for step in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL_MASK, before, step)
        if lane >= step:
            before += other
    if lane == WARP - 1:
        room[warp] = before
    cuda.syncthreads()
    if tid < DIGITS:
        before -= own
        for w in range(warp):
            before += room[w]
        for w in range(SORT_WARPS):
            count = counts[w, tid]
            counts[w, tid] = before
            before += count
    cuda.syncthreads()


@cuda.jit(device=True, cache=True)
def sort_by_token(order, tokens, first, count, passes):
    """The block sorts the keys of the tokens from first to first + count into order."""
    sorted_keys = cuda.shared.array(POSITIONS, int32)
    counts = cuda.shared.array((SORT_WARPS, DIGITS), int32)
    keys = cuda.local.array(ROUNDS, int32)
    tid, lane, warp = cuda.threadIdx.x, cuda.laneid, cuda.threadIdx.x >> 5
    rounds = (count + SORT_THREADS - 1) // SORT_THREADS
    for r in range(ROUNDS):
        if r < rounds:
            position = (warp * rounds + r) * WARP + lane
            token = tokens[first + position] if position < count else int32(PADDING)
            keys[r] = token << POSITION_BITS | position
    for p in range(passes):
        sort_pass(keys, sorted_keys, counts, rounds, POSITION_BITS + 8 * p)
    for r in range(ROUNDS):
        if r < rounds:
            order[1 + (warp * rounds + r) * WARP + lane] = keys[r]
    if tid == 0:
        order[0] = -1
        order[1 + rounds * SORT_THREADS] = PADDING << POSITION_BITS


@cuda.jit(cache=True, fastmath=True, launch_bounds=(SORT_THREADS, 2))  # two blocks on a multiprocessor: 64 registers
def sort_and_dwpe_kernel(order, runs, dwpe, dout, tokens, b, sequences, passes):
    """Of the sequences from b on: the first block sorts, the others add to dwpe."""
    B, T, C = dout.shape
    if cuda.blockIdx.x == 0:
        runs[0] = 0
        sort_by_token(order, tokens, b * T, sequences * T, passes)
    else:
        i = 4 * (cuda.grid(1) - cuda.blockDim.x)
        if i < T * C:
            total = sum_of_rows(dout, b * T * C + i, T * C, sequences)
            store4(dwpe, i, *add4(load4(dwpe, i), total))


@cuda.jit(device=True, cache=True, fastmath=True)
def add_window(dwte, partials, runs, dout, order, first, window, windows):
    """The block takes the WINDOW keys of a window of order. The sum of a run that lies within goes into dwte. Of one that began
    in an earlier window it goes to partials[0, window], of one that goes on in a later window to partials[1, window]; runs
    lists, behind their number, the windows where such runs begin."""
    C = dwte.shape[1]
    tokens, places = cuda.local.array(NEIGHBOURHOOD, int32), cuda.local.array(NEIGHBOURHOOD, int32)
    rows, old = cuda.local.array((WINDOW, 4), float32), cuda.local.array((WINDOW, 4), float32)
    for n in range(NEIGHBOURHOOD):
        key = order[window * WINDOW + n]
        tokens[n], places[n] = key >> POSITION_BITS, key & (POSITIONS - 1)
    if cuda.threadIdx.x == 0 and tokens[0] != tokens[WINDOW] and tokens[WINDOW] == tokens[WINDOW + 1] != PADDING:
        runs[1 + cuda.atomic.add(runs, 0, 1)] = window
    c = 4 * cuda.threadIdx.x
    while c < C:
        for n in range(WINDOW):  # all loads before anything waits for one
            if tokens[n + 1] != PADDING:
                row = load4_streaming(dout, (first + places[n + 1]) * C + c)
                rows[n, 0], rows[n, 1], rows[n, 2], rows[n, 3] = row
        for n in range(WINDOW):
            if tokens[n + 1] != PADDING and tokens[n + 2] != tokens[n + 1]:
                row = load4_streaming(dwte, tokens[n + 1] * C + c)
                old[n, 0], old[n, 1], old[n, 2], old[n, 3] = row
        total = float32(0), float32(0), float32(0), float32(0)
        began_here = tokens[0] != tokens[1]
        for n in range(WINDOW):
            token = tokens[n + 1]
            if token != PADDING:
                total = add4(total, (rows[n, 0], rows[n, 1], rows[n, 2], rows[n, 3]))
                ends = tokens[n + 2] != token
                if ends and began_here:
                    store4(dwte, token * C + c, *add4((old[n, 0], old[n, 1], old[n, 2], old[n, 3]), total))
                elif ends or n == WINDOW - 1:
                    store4(partials, ((windows if began_here else 0) + window) * C + c, *total)
                if ends:
                    total = float32(0), float32(0), float32(0), float32(0)
                    began_here = True
        c += 4 * cuda.blockDim.x


@cuda.jit(cache=True, fastmath=True, launch_bounds=(ROW_THREADS, 5))
def window_kernel(dwte, partials, runs, dout, order, first):
    add_window(dwte, partials, runs, dout, order, first, cuda.blockIdx.x, cuda.gridDim.x)


@cuda.jit(cache=True, fastmath=True)
def long_runs_kernel(dwte, partials, runs, order, windows):
    """A block takes LONG_RUN_CHANNELS of the next long run: every warp adds up a share of its windows' partials, then the
    first warp the warps' sums."""
    sums = cuda.shared.array((LONG_RUN_WARPS, LONG_RUN_CHANNELS), float32, alignment=16)
    C, thread, lane, warp = dwte.shape[1], cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    c = LONG_RUN_CHANNELS * cuda.blockIdx.y + 4 * lane
    k = cuda.blockIdx.x
    while k < runs[0]:
        window = runs[1 + k]
        token = order[(window + 1) * WINDOW] >> POSITION_BITS  # of the window's last key
        end = window + 1
        found = cuda.blockDim.x
        while found == cuda.blockDim.x:  # the first window that the run does not reach
            other = end + thread
            more = other < windows and order[other * WINDOW + 1] >> POSITION_BITS == token
            found = cuda.syncthreads_count(int32(1 if more else 0))
            end += found
        total = float32(0), float32(0), float32(0), float32(0)
        if c < C:
            if warp == 0:
                total = load4(partials, (windows + window) * C + c)
            own = window + 1 + warp
            count = (end - own + LONG_RUN_WARPS - 1) // LONG_RUN_WARPS
            total = add4(total, sum_of_rows(partials, own * C + c, LONG_RUN_WARPS * C, count))
        store4(sums, LONG_RUN_CHANNELS * warp + 4 * lane, *total)
        cuda.syncthreads()
        if warp == 0 and c < C:
            for w in range(1, LONG_RUN_WARPS):
                total = add4(total, load4(sums, LONG_RUN_CHANNELS * w + 4 * lane))
            store4(dwte, token * C + c, *add4(load4(dwte, token * C + c), total))
        k += cuda.gridDim.x
        cuda.syncthreads()


def portions(dwte, dout, positions):
    """How version 5 and 7 divide their work: for each portion its first sequence and how many there are."""
    B, T = dout.shape[:2]
    need(T <= positions, f"needs T at most {positions}, got {T}")
    need(len(dwte) <= PADDING, f"needs at most {PADDING} rows of wte, got {len(dwte)}")
    at_once = min(B, positions // T)
    return [(b, min(at_once, B - b)) for b in range(0, B, at_once)]


def scratch_for_runs(T, C, sequences):
    """order, partials and runs, for so many sequences."""
    windows = ceil_div(sequences * T, WINDOW)
    order = scratch("encoder_backward_order", 1 + POSITIONS + WINDOW, np.int32)
    partials = scratch("encoder_backward_partials", (2, windows, C))
    return order, partials, scratch("encoder_backward_runs", 1 + windows, np.int32)


def add_long_runs(dwte, partials, runs, order, windows, stream):
    """The last kernel of versions 5 and 7."""
    grid = min(windows, LONG_RUN_BLOCKS), ceil_div(dwte.shape[1], LONG_RUN_CHANNELS)
    long_runs_kernel[grid, WARP * LONG_RUN_WARPS, stream](dwte, partials, runs, order, windows)


@encoder_backward.version(5, "a radix sort beside the sums of dwpe, long runs shared out among blocks")
def encoder_backward5(dwte, dwpe, dout, inp, *, positions=POSITIONS, stream=0):
    """As version 3, with C a multiple of 4, T at most 8192 and V below 262144; positions: how many are sorted at a time."""
    B, T, C = dout.shape
    threads, parts = threads_of_row(C, ROW_THREADS), portions(dwte, dout, positions)
    order, partials, runs = scratch_for_runs(T, C, parts[0][1])
    tokens, passes = inp.reshape(B * T), ceil_div((len(dwte) - 1).bit_length(), 8)
    blocks = 1 + ceil_div(T * C, 4 * SORT_THREADS)
    for b, sequences in parts:
        windows = ceil_div(sequences * T, WINDOW)
        sort_and_dwpe_kernel[blocks, SORT_THREADS, stream](order, runs, dwpe, dout, tokens, b, sequences, passes)
        window_kernel[windows, threads, stream](dwte, partials, runs, dout, order, b * T)
        add_long_runs(dwte, partials, runs, order, windows, stream)


@cuda.jit(cache=True, fastmath=True)
def encoder_backward_kernel6(dwte, dwpe, dout, inp):
    B, T, C = dout.shape
    t, sequence = cuda.blockIdx.x, T * C
    c = 4 * cuda.threadIdx.x
    while c < C:
        i, b = t * C + c, 0
        total = load4(dwpe, i)
        while b + 4 <= B:
            x0 = load4(dout, i)
            x1 = load4(dout, i + sequence)
            x2 = load4(dout, i + 2 * sequence)
            x3 = load4(dout, i + 3 * sequence)
            atomic_add4(dwte, inp[b, t] * C + c, *x0)
            atomic_add4(dwte, inp[b + 1, t] * C + c, *x1)
            atomic_add4(dwte, inp[b + 2, t] * C + c, *x2)
            atomic_add4(dwte, inp[b + 3, t] * C + c, *x3)
            total = add4(total, add4(add4(x0, x1), add4(x2, x3)))
            i += 4 * sequence
            b += 4
        while b < B:
            x = load4(dout, i)
            atomic_add4(dwte, inp[b, t] * C + c, *x)
            total = add4(total, x)
            i += sequence
            b += 1
        store4(dwpe, t * C + c, *total)
        c += 4 * cuda.blockDim.x


@encoder_backward.version(
    6,
    "16-byte atomics for dwte alone, one kernel (their order decides the last bits)",
    repeatable=False,
    needs_cc=(9, 0),
)
def encoder_backward6(dwte, dwpe, dout, inp, *, block_size=256, stream=0):
    """As version 3, with C a multiple of 4."""
    T, C = dout.shape[1:]
    encoder_backward_kernel6[T, threads_of_row(C, block_size), stream](dwte, dwpe, dout, inp)


# Version 7 deals the keys into buckets by a hash of their tokens: in which order the tokens come is all one, as long as equal
# ones come together, and the frequent ones should not all be in one bucket. Each bucket is a block's.
BUCKETS = 128  # at most
BUCKET_KEYS = 32  # of a bucket, on average, if the buckets are fewer
COMPARED = 16  # keys, before the next round of a loop
BUCKET_ROOM = POSITIONS + COMPARED
TOKENS = 8  # that a thread looks at


@cuda.jit(device=True, cache=True)
def bucket_of(token, buckets):
    """buckets: a power of 2. (Knuth, The Art of Computer Programming 3, 6.4: multiply by the golden ratio, take upper bits.)"""
    return (token * 0x9E3779B9 >> 16) & (buckets - 1)


@cuda.jit(device=True, cache=True)
def smaller(n, a, key):
    """n, and one more if a < key: both lie between 0 and 2^31, and the sign of the difference is all that is needed."""
    return int32(n - (int32(a - key) >> 31))


@cuda.jit(cache=True)
def bucket_kernel(order, runs, tokens, first, count):
    """Of the tokens from first to first + count, each block looks at all and keeps the keys of its bucket. They go to their places
    in order: behind those of lower buckets, and there where the number of smaller keys in the bucket tells."""
    keys = cuda.shared.array(BUCKET_ROOM, int32, alignment=16)
    counts = cuda.shared.array(2, int32)  # keys in this bucket, keys in lower ones
    mine = cuda.local.array(TOKENS, int32)
    tid, bucket, buckets = cuda.threadIdx.x, cuda.blockIdx.x, cuda.gridDim.x
    for r in range(TOKENS):  # all on their way at once
        mine[r] = tokens[first + min(r * cuda.blockDim.x + tid, count - 1)]
    if tid < 2:
        counts[tid] = 0
    cuda.syncthreads()
    lower = int32(0)
    for r in range(TOKENS):
        position = r * cuda.blockDim.x + tid
        if position < count:
            other = bucket_of(mine[r], buckets)
            lower += int32(other < bucket)
            if other == bucket:
                keys[cuda.atomic.add(counts, 0, 1)] = mine[r] << POSITION_BITS | position
    lower = warp_sum(lower)
    if cuda.laneid == 0:
        cuda.atomic.add(counts, 1, lower)
    cuda.syncthreads()
    found, before = counts[0], counts[1]
    if tid < COMPARED:
        keys[found + tid] = PADDING << POSITION_BITS
    cuda.syncthreads()
    for i in range(tid, found, cuda.blockDim.x):
        key, place = keys[i], int32(1 + before)
        for j in range(0, found, COMPARED):
            for k in range(j, j + COMPARED, 4):
                a, b, c, d = load4(keys, k)
                place = smaller(smaller(smaller(smaller(place, a, key), b, key), c, key), d, key)
        order[place] = key
    if bucket == 0 and tid < WINDOW:
        order[1 + count + tid] = PADDING << POSITION_BITS
        if tid == 0:
            order[0], runs[0] = -1, 0


@cuda.jit(cache=True, fastmath=True, launch_bounds=(ROW_THREADS, 5))
def windows_and_dwpe_kernel(dwte, dwpe, partials, runs, dout, order, b, sequences, summing):
    """Of the sequences from b on: the first blocks, `summing` of them, add to dwpe; the others take a window each."""
    B, T, C = dout.shape
    if cuda.blockIdx.x < summing:
        i = 4 * cuda.grid(1)
        if i < T * C:
            total = sum_of_rows(dout, b * T * C + i, T * C, sequences)
            store4(dwpe, i, *add4(load4(dwpe, i), total))
    else:
        window, windows = cuda.blockIdx.x - summing, cuda.gridDim.x - summing
        add_window(dwte, partials, runs, dout, order, b * T, window, windows)


def buckets_for(count):
    """A power of 2."""
    return 1 << max(1, min(count // BUCKET_KEYS, BUCKETS)).bit_length() - 1


@encoder_backward.version(7, "keys in buckets, a block sorts each; dwpe beside the rows of dwte")
def encoder_backward7(dwte, dwpe, dout, inp, *, positions=POSITIONS, stream=0):
    """As version 5."""
    B, T, C = dout.shape
    threads, parts = threads_of_row(C, ROW_THREADS), portions(dwte, dout, positions)
    order, partials, runs = scratch_for_runs(T, C, parts[0][1])
    tokens, summing = inp.reshape(B * T), ceil_div(T * C, 4 * threads)
    for b, sequences in parts:
        count = sequences * T
        windows = ceil_div(count, WINDOW)
        bucket_kernel[buckets_for(count), WARP * ceil_div(count, WARP * TOKENS), stream](order, runs, tokens, b * T, count)
        windows_and_dwpe_kernel[summing + windows, threads, stream](
            dwte, dwpe, partials, runs, dout, order, b, sequences, summing
        )
        add_long_runs(dwte, partials, runs, order, windows, stream)
