"""Encoder backward: every row of dout is added to the row of dwte of its token and to the row of dwpe of its position.

version 1: a thread an element, with atomic additions, since a token can occur twice
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda
from kernels.encoder.forward import encoder_forward, random_tokens, rows_touched
from kernels.op import Op


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
        {"B": 2, "T": 100, "C": 4, "V": 1, "zipf": 0},
        {"B": 1, "T": 300, "C": 6, "V": 70000, "zipf": 1},
    ],
    trainer_shapes=encoder_forward.trainer_shapes,
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


@encoder_backward.version(1, "a thread an element, atomic additions (their order decides the last bits)", repeatable=False)
def encoder_backward1(dwte, dwpe, dout, inp, *, block_size=256, stream=0):
    """dwte: float32 (V, C) and dwpe: (maxT, C), added to; dout: (B, T, C); inp: int32 (B, T), on the device."""
    encoder_backward_kernel1[ceil_div(dout.size, block_size), block_size, stream](dwte, dwpe, dout, inp)
