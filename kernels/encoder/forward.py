"""Encoder forward: out = wte[inp] + wpe, the embedding of a token plus that of its position.

version 1: a thread a token
version 2: a thread an element: neighbouring threads read and write neighbouring addresses
version 3: a block a token, a thread four channels: 16-byte loads and stores, and one index to compute
version 4: a block the same position of four sequences: its row of wpe is read once, and four rows of wte at a time
"""

import numpy as np

import cpu_reference
from kernels.device import WARP, ceil_div, cuda, load4, load4_readonly, need, store4
from kernels.op import Op
from kernels.reduce import add4


def random_tokens(rng, B, T, V, zipf):
    """int32 (B,T) below V. zipf=0: every token as often as any other, so all different while B*T <= V; zipf=1: the n-th
    token about 1/n as often as the first, as in text (Zipf's law), where one token makes up a tenth of it."""
    if zipf:
        return rng.choice(V, (B, T), p=token_shares(V)).astype(np.int32)
    rounds = [rng.permutation(V) for _ in range(ceil_div(B * T, V))]
    return np.concatenate(rounds)[: B * T].reshape(B, T).astype(np.int32)


def token_shares(V):
    weights = 1 / np.arange(1, V + 1)
    return weights / weights.sum()


def rows_touched(B, T, V, zipf):
    """How many rows of wte a batch of random_tokens touches (with zipf=1: is expected to)."""
    return round(V - ((1 - token_shares(V)) ** (B * T)).sum()) if zipf else min(B * T, V)


def encoder_inputs(rng, B, T, C, V, zipf):
    return {
        "inp": random_tokens(rng, B, T, V, zipf),
        "wte": rng.standard_normal((V, C), dtype=np.float32),
        "wpe": rng.standard_normal((T, C), dtype=np.float32),
    }


encoder_forward = Op(
    reference=cpu_reference.encoder_forward,
    inputs=encoder_inputs,
    outputs=lambda B, T, C, V, zipf: {"out": (B, T, C)},
    bytes_moved=lambda B, T, C, V, zipf: 4 * (B * T * C + rows_touched(B, T, V, zipf) * C + T * C + B * T),
    shape={"B": 8, "T": 1024, "C": 768, "V": 50257, "zipf": 0},
    small={"B": 2, "T": 7, "C": 36, "V": 30, "zipf": 0},
    odd=[{"B": 2, "T": 3, "C": C, "V": 7, "zipf": 0} for C in (1, 3, 33, 768, 1600)]
    + [{"B": 1, "T": 1, "C": 12, "V": 5, "zipf": 0}, {"B": 3, "T": 50, "C": 8, "V": 4, "zipf": 1}]
    + [{"B": 5, "T": 3, "C": 136, "V": 9, "zipf": 1}],
    sizes=lambda given: {**dict(zip("BTC", given["out"].shape, strict=True)), "V": len(given["wte"]), "zipf": 1},
    trainer_shapes=[{"B": 4, "T": 1024, "C": 768, "V": 50257, "zipf": 1}],
    large=[{"B": 240, "T": 1024, "C": 1024, "V": 250_000, "zipf": 0}],
)


@cuda.jit(cache=True, fastmath=True)
def encoder_forward_kernel1(out, inp, wte, wpe):
    B, T, C = out.shape
    row = cuda.grid(1)
    if row < B * T:
        b, t = row // T, row % T
        token = inp[b, t]
        for c in range(C):
            out[b, t, c] = wte[token, c] + wpe[t, c]


@encoder_forward.version(1, "a thread a token")
def encoder_forward1(out, inp, wte, wpe, *, block_size=128, stream=0):
    """out: float32 (B, T, C); inp: int32 (B, T); wte: (V, C); wpe: (maxT, C) with maxT >= T, on the device."""
    encoder_forward_kernel1[ceil_div(inp.size, block_size), block_size, stream](out, inp, wte, wpe)


@cuda.jit(cache=True, fastmath=True)
def encoder_forward_kernel2(out, inp, wte, wpe):
    B, T, C = out.shape
    i = cuda.grid(1)
    if i < B * T * C:
        row, c = i // C, i % C
        b, t = row // T, row % T
        out[b, t, c] = wte[inp[b, t], c] + wpe[t, c]


@encoder_forward.version(2, "a thread an element")
def encoder_forward2(out, inp, wte, wpe, *, block_size=256, stream=0):
    """out: float32 (B, T, C); inp: int32 (B, T); wte: (V, C); wpe: (maxT, C) with maxT >= T, on the device."""
    encoder_forward_kernel2[ceil_div(out.size, block_size), block_size, stream](out, inp, wte, wpe)


@cuda.jit(cache=True, fastmath=True)
def encoder_forward_kernel3(out, inp, wte, wpe):
    B, T, C = out.shape
    t, b = cuda.blockIdx.x, cuda.blockIdx.y
    to, token, position = (b * T + t) * C, inp[b, t] * C, t * C
    c = 4 * cuda.threadIdx.x
    while c < C:  # not `for c in range(...)`, which divides to count its rounds
        store4(out, to + c, *add4(load4(wte, token + c), load4(wpe, position + c)))
        c += 4 * cuda.blockDim.x


def threads_of_row(C, block_size):
    """Threads for the C // 4 groups of four channels of a row, in whole warps."""
    need(C % 4 == 0, f"needs C a multiple of 4, got {C}")
    return min(block_size, WARP * ceil_div(C // 4, WARP))


@encoder_forward.version(3, "a block a token, 16-byte loads and stores")
def encoder_forward3(out, inp, wte, wpe, *, block_size=128, stream=0):
    """As version 2, with C a multiple of 4."""
    B, T, C = out.shape
    need(B < 65536, f"needs B below 65536, got {B}")
    encoder_forward_kernel3[(T, B), threads_of_row(C, block_size), stream](out, inp, wte, wpe)


@cuda.jit(cache=True, fastmath=True)
def encoder_forward_kernel4(out, inp, wte, wpe):
    B, T, C = out.shape
    t, b = cuda.blockIdx.x, 4 * cuda.blockIdx.y
    sequence = T * C
    c = 4 * cuda.threadIdx.x
    if b + 4 <= B:
        row0, row1, row2, row3 = inp[b, t] * C, inp[b + 1, t] * C, inp[b + 2, t] * C, inp[b + 3, t] * C
        while c < C:
            i = b * sequence + t * C + c
            position = load4_readonly(wpe, t * C + c)
            x0 = load4_readonly(wte, row0 + c)
            x1 = load4_readonly(wte, row1 + c)
            x2 = load4_readonly(wte, row2 + c)
            x3 = load4_readonly(wte, row3 + c)
            store4(out, i, *add4(x0, position))
            store4(out, i + sequence, *add4(x1, position))
            store4(out, i + 2 * sequence, *add4(x2, position))
            store4(out, i + 3 * sequence, *add4(x3, position))
            c += 4 * cuda.blockDim.x
    else:
        while c < C:
            position = load4_readonly(wpe, t * C + c)
            for last in range(b, B):
                x = load4_readonly(wte, inp[last, t] * C + c)
                store4(out, last * sequence + t * C + c, *add4(x, position))
            c += 4 * cuda.blockDim.x


@encoder_forward.version(4, "a block four sequences at one position: four independent rows")
def encoder_forward4(out, inp, wte, wpe, *, block_size=256, stream=0):
    """As version 2, with C a multiple of 4."""
    B, T, C = out.shape
    need(B < 4 * 65536, f"needs B below {4 * 65536}, got {B}")
    encoder_forward_kernel4[(T, ceil_div(B, 4)), threads_of_row(C, block_size), stream](out, inp, wte, wpe)
