"""Matmul forward: out = inp @ weight.T + bias, and the same with GELU or a residual in its epilogue.

version 0: cuBLASLt, with its own epilogues
"""

import numpy as np

import cpu_reference
from kernels import cublas
from kernels.op import Op


def forward_inputs(rng, N, C, OC):
    return {
        "inp": rng.standard_normal((N, C), dtype=np.float32),
        "weight": rng.standard_normal((OC, C), dtype=np.float32),
        "bias": rng.standard_normal(OC, dtype=np.float32),
    }


def product_bytes(N, C, OC) -> int:
    """Each of the three matrices once."""
    return 4 * (N * C + OC * C + N * OC)


def product_flops(N, C, OC) -> int:
    return 2 * N * C * OC


QKV, ATTPROJ, FC, FCPROJ, HEAD = (  # GPT-2 124M's five products, B*T = 4096
    {"N": 4096, "C": C, "OC": OC} for C, OC in ((768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 50304))
)
SMALL = {"N": 20, "C": 36, "OC": 24}
ODD = [{"N": N, "C": C, "OC": OC} for N, C, OC in ((1, 33, 100), (33, 1, 1), (3, 100, 33), (70, 64, 132), (1, 4, 1))]

matmul_forward = Op(
    reference=cpu_reference.matmul_forward,
    inputs=forward_inputs,
    outputs=lambda N, C, OC: {"out": (N, OC)},
    bytes_moved=product_bytes,
    flops=product_flops,
    shape=FC,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[QKV, ATTPROJ, FC, FCPROJ, HEAD],
)

matmul_gelu_forward = Op(
    reference=cpu_reference.matmul_gelu_forward,
    inputs=forward_inputs,
    outputs=lambda N, C, OC: {"out": (N, OC), "pre": (N, OC)},
    bytes_moved=lambda N, C, OC: product_bytes(N, C, OC) + 4 * N * OC,
    flops=product_flops,
    shape=FC,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[FC],
)

matmul_residual_forward = Op(
    reference=cpu_reference.matmul_residual_forward,
    inputs=lambda rng, N, C, OC: forward_inputs(rng, N, C, OC) | {"residual": rng.standard_normal((N, OC), dtype=np.float32)},
    outputs=lambda N, C, OC: {"out": (N, OC)},
    bytes_moved=lambda N, C, OC: product_bytes(N, C, OC) + 4 * N * OC,
    flops=product_flops,
    shape=FCPROJ,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[ATTPROJ, FCPROJ],
)


@matmul_forward.version(0, "cuBLASLt, bias in the epilogue", precision="either", needs=cublas.missing)
def matmul_forward0(out, inp, weight, bias, *, tf32=True, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    epilogue = "DEFAULT" if bias is None else "BIAS"
    out, inp, weight = map(cublas.Matrix.of, (out, inp, weight))
    cublas.product(out, inp, weight, trans_b=True, epilogue=epilogue, bias=bias, tf32=tf32, stream=stream)


@matmul_gelu_forward.version(0, "cuBLASLt, bias and GELU in the epilogue", precision="either", needs=cublas.missing)
def matmul_gelu_forward0(out, pre, inp, weight, bias, *, tf32=True, stream=0):
    """out, pre (N,OC), inp (N,C), weight (OC,C), bias (OC,): float32, on the device; OC a multiple of 8."""
    out, pre, inp, weight = map(cublas.Matrix.of, (out, pre, inp, weight))
    cublas.product(
        out, inp, weight, trans_b=True, epilogue="GELU_AUX_BIAS", bias=bias, aux=pre, tf32=tf32, stream=stream
    )


@matmul_residual_forward.version(0, "cuBLASLt, bias in the epilogue, the residual as C", precision="either", needs=cublas.missing)
def matmul_residual_forward0(out, inp, weight, bias, residual, *, tf32=True, stream=0):
    """out, residual (N,OC), inp (N,C), weight (OC,C), bias (OC,): float32, on the device."""
    out, inp, weight, residual = map(cublas.Matrix.of, (out, inp, weight, residual))
    cublas.product(
        out, inp, weight, trans_b=True, add=residual, epilogue="BIAS", bias=bias, tf32=tf32, stream=stream
    )
