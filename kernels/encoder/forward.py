"""Encoder forward: out = wte[inp] + wpe, the embedding of a token plus that of its position.

version 1: a thread a token
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda
from kernels.op import Op


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
    + [{"B": 1, "T": 1, "C": 12, "V": 5, "zipf": 0}, {"B": 3, "T": 50, "C": 8, "V": 4, "zipf": 1}],
    trainer_shapes=[{"B": 4, "T": 1024, "C": 768, "V": 50257, "zipf": 1}],
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
