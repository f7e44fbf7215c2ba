"""The fused classifier: the loss of every row and the logits' gradient, in place of the logits.

    losses = -log softmax(logits)[target]         logits <- (softmax(logits) - onehot(target)) * dloss

over the V columns of the vocabulary; the Vp - V columns of padding are never read, and are written zero.

version 1: a thread a row
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32
from kernels.op import Op


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
    odd=[{"N": 2, "V": V, "Vp": Vp} for V, Vp in ((1, 1), (1, 4), (33, 33), (100, 101), (1001, 1024), (1024, 1024))],
)


@cuda.jit(cache=True, fastmath=True)
def fused_classifier_kernel1(logits, losses, dloss, targets, V):
    row = cuda.grid(1)
    N, Vp = logits.shape
    if row < N:
        largest = float32(-math.inf)
        for v in range(V):
            largest = max(largest, logits[row, v])
        total = float32(0)
        for v in range(V):
            total += math.exp(logits[row, v] - largest)
        target = targets[row]
        losses[row] = math.log(total) + largest - logits[row, target]
        scale = float32(dloss)
        for v in range(V):
            prob = math.exp(logits[row, v] - largest) / total
            logits[row, v] = (prob - float32(1 if v == target else 0)) * scale
        for v in range(V, Vp):
            logits[row, v] = float32(0)


@fused_classifier.version(1, "a thread a row")
def fused_classifier1(logits, losses, dloss, targets, V, *, block_size=128, stream=0):
    """logits: float32 (N, Vp); losses: (N,); dloss: a float, 1/N for the mean's gradient; targets: int32 (N,) below V."""
    blocks = ceil_div(logits.shape[0], block_size)
    fused_classifier_kernel1[blocks, block_size, stream](logits, losses, dloss, targets, V)
