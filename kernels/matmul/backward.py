"""Matmul backward: dinp = dout @ weight and dweight = dout.T @ inp, what matmul_forward's gradient takes.

version 0: cuBLASLt, with its own epilogues
"""

import numpy as np

import cpu_reference
from kernels import cublas
from kernels.matmul.forward import ATTPROJ, FC, FCPROJ, HEAD, ODD, QKV, SMALL, product_bytes, product_flops
from kernels.op import Op

matmul_backward_input = Op(
    reference=cpu_reference.matmul_backward_input,
    inputs=lambda rng, N, C, OC: {
        "dout": rng.standard_normal((N, OC), dtype=np.float32),
        "weight": rng.standard_normal((OC, C), dtype=np.float32),
    },
    outputs=lambda N, C, OC: {"dinp": (N, C)},
    bytes_moved=product_bytes,
    flops=product_flops,
    shape=FC,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[QKV, ATTPROJ, FC, FCPROJ, HEAD],
)

matmul_gelu_backward_input = Op(
    reference=cpu_reference.matmul_gelu_backward_input,
    inputs=lambda rng, N, C, OC: {
        "dout": rng.standard_normal((N, OC), dtype=np.float32),
        "weight": rng.standard_normal((OC, C), dtype=np.float32),
        "pre": rng.standard_normal((N, C), dtype=np.float32),
    },
    outputs=lambda N, C, OC: {"dinp": (N, C)},
    bytes_moved=lambda N, C, OC: product_bytes(N, C, OC) + 4 * N * C,
    flops=product_flops,
    shape=FCPROJ,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[FCPROJ],
)


def weight_inputs(rng, N, C, OC, accumulate=1):
    """With accumulate=0 what dweight holds must not matter: it holds NaN."""
    return {
        "dweight": rng.standard_normal((OC, C), dtype=np.float32) if accumulate else np.full((OC, C), np.nan, np.float32),
        "dout": rng.standard_normal((N, OC), dtype=np.float32),
        "inp": rng.standard_normal((N, C), dtype=np.float32),
        "accumulate": bool(accumulate),
    }


matmul_backward_weight = Op(
    reference=cpu_reference.matmul_backward_weight,
    inputs=weight_inputs,
    outputs=lambda N, C, OC, accumulate=1: {},
    changed=("dweight",),
    bytes_moved=lambda N, C, OC, accumulate=1: product_bytes(N, C, OC) + 4 * accumulate * OC * C,
    flops=lambda N, C, OC, accumulate=1: product_flops(N, C, OC),
    shape=FC | {"accumulate": 0},
    small=SMALL,
    odd=ODD + [shape | {"accumulate": 0} for shape in ODD[:2]],
    trainer_shapes=[shape | {"accumulate": 0} for shape in (QKV, ATTPROJ, FC, FCPROJ, HEAD)],
)


@matmul_backward_input.version(0, "cuBLASLt", precision="either", needs=cublas.missing)
def matmul_backward_input0(dinp, dout, weight, *, tf32=True, stream=0):
    """dinp (N,C), dout (N,OC), weight (OC,C): float32, on the device."""
    dinp, dout, weight = map(cublas.Matrix.of, (dinp, dout, weight))
    cublas.product(dinp, dout, weight, tf32=tf32, stream=stream)


@matmul_gelu_backward_input.version(0, "cuBLASLt, GELU's slope in the epilogue", precision="either", needs=cublas.missing)
def matmul_gelu_backward_input0(dinp, dout, weight, pre, *, tf32=True, stream=0):
    """dinp, pre (N,C), dout (N,OC), weight (OC,C): float32, on the device; C a multiple of 8."""
    dinp, dout, weight, pre = map(cublas.Matrix.of, (dinp, dout, weight, pre))
    cublas.product(dinp, dout, weight, epilogue="DGELU", aux=pre, tf32=tf32, stream=stream)


@matmul_backward_weight.version(0, "cuBLASLt", precision="either", needs=cublas.missing)
def matmul_backward_weight0(dweight, dout, inp, accumulate, *, tf32=True, stream=0):
    """dweight (OC,C), dout (N,OC), inp (N,C): float32, on the device; accumulate a bool."""
    dweight, dout, inp = map(cublas.Matrix.of, (dweight, dout, inp))
    cublas.product(dweight, dout, inp, trans_a=True, add=dweight if accumulate else None, tf32=tf32, stream=stream)
