"""Matmul backward: dinp = dout @ weight and dweight = dout.T @ inp, what matmul_forward's gradient takes.

Both are the forward's product in another layout: what is summed over lies apart in one operand or in both. The engine
takes all layouts, so the ladder is short.

version 0: cuBLASLt, with its own epilogues
version 1: a thread an element; with GELU: cuBLASLt, then our GELU's backward
version 2: the weight's gradient from cuBLASLt, the smaller operand transposed first
version 8: the engine in fp32
version 10: the engine in TF32 on the tensor cores (11 where an epilogue is fused)
version 12: wgmma; what it wants the other way round is transposed first, the smaller operand
version 13: wgmma fed by TMA, the same transposed first
version 14: version 13 or cuBLASLt, what is faster at the shape
version 15: the engine with three products of TF32 for each, which give the digits of fp32
version 16: the same with wgmma and TMA
"""

import functools

import numpy as np

import cpu_reference
from kernels import cublas
from kernels.device import ceil_div, cuda, float32, need, scratch
from kernels.gelu.backward import gelu_backward
from kernels.matmul import engine, tma, wgmma
from kernels.matmul.epilogue import ADD, SLOPE, STORE
from kernels.matmul.faster import faster_of, missing
from kernels.matmul.forward import (
    ATTPROJ,
    CUBE,
    FC,
    FCPROJ,
    HEAD,
    ODD,
    QKV,
    SMALL,
    product_bytes,
    product_flops,
    sizes_of,
)
from kernels.matmul.transpose import transpose
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
    sizes=sizes_of,
    shape=FC,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[QKV, ATTPROJ, FC, FCPROJ, HEAD],
    large=[CUBE],
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
    sizes=sizes_of,
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
    sizes=lambda given: sizes_of(given) | {"accumulate": int(given["accumulate"])},
    shape=FC | {"accumulate": 0},
    small=SMALL,
    odd=ODD + [shape | {"accumulate": 0} for shape in ODD[:2]],
    trainer_shapes=[shape | {"accumulate": 0} for shape in (QKV, ATTPROJ, FC, FCPROJ, HEAD)],
    large=[CUBE | {"accumulate": 0}],
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


@cuda.jit(cache=True, fastmath=True)
def matmul_backward_input_kernel1(dinp, dout, weight):
    c, n = cuda.grid(2)
    N, C = dinp.shape
    if n < N and c < C:
        total = float32(0)
        for o in range(weight.shape[0]):
            total += dout[n, o] * weight[o, c]
        dinp[n, c] = total


@matmul_backward_input.version(1, "a thread an element of dinp")
def matmul_backward_input1(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0."""
    N, C = dinp.shape
    matmul_backward_input_kernel1[(ceil_div(C, 32), ceil_div(N, 8)), (32, 8), stream](dinp, dout, weight)


@matmul_backward_input.version(8, "the engine in fp32: register tiles, cp.async, three stages", needs_cc=(8, 0))
def matmul_backward_input8(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0."""
    engine.multiply(dinp, dout, weight, b_m_major=True, tf32=0, stream=stream)


@matmul_backward_input.version(10, "the engine in TF32", precision="tf32", needs_cc=(8, 0))
def matmul_backward_input10(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0."""
    engine.multiply(dinp, dout, weight, b_m_major=True, stream=stream)


@matmul_backward_input.version(12, "wgmma, weight transposed first", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_backward_input12(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0; C and OC multiples of 4."""
    wgmma.multiply(dinp, dout, transpose(weight, stream), stream=stream)


@matmul_backward_input.version(13, "wgmma fed by TMA, likewise", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_backward_input13(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0; C and OC multiples of 4."""
    tma.multiply(dinp, dout, transpose(weight, stream), stream=stream)


@matmul_backward_input.version(
    14, "version 0 or 13, the faster at the shape", precision="tf32", needs_cc=(9, 0), needs=missing, chooses=True
)
def matmul_backward_input14(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0."""
    faster_of((matmul_backward_input0, matmul_backward_input13), dinp, dout, weight, stream=stream)


@matmul_backward_input.version(
    15, "fp32's digits from three products of mma.sync", precision="3xtf32", needs_cc=(8, 0)
)
def matmul_backward_input15(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0."""
    engine.multiply(dinp, dout, weight, b_m_major=True, tf32=3, stream=stream)


@matmul_backward_input.version(
    16, "fp32's digits from three of wgmma, weight transposed first", precision="3xtf32", needs_cc=(9, 0), needs=wgmma.missing
)
def matmul_backward_input16(dinp, dout, weight, *, stream=0):
    """As matmul_backward_input0; C and OC multiples of 4."""
    tma.multiply(dinp, dout, transpose(weight, stream, rounded=False), tf32=3, stream=stream)


@matmul_gelu_backward_input.version(1, "two kernels: cuBLASLt, then our GELU's backward", precision="either", needs=cublas.missing)
def matmul_gelu_backward_input1(dinp, dout, weight, pre, *, tf32=True, stream=0):
    """As matmul_gelu_backward_input0, any C."""
    dgelu = scratch("matmul_gelu_backward_input1", dinp.shape)
    matmul_backward_input0(dgelu, dout, weight, tf32=tf32, stream=stream)
    gelu_backward.versions[3](*(array.reshape(array.size) for array in (dinp, pre, dgelu)), stream=stream)


@matmul_gelu_backward_input.version(8, "the engine in fp32, GELU's slope on the way", needs_cc=(8, 0))
def matmul_gelu_backward_input8(dinp, dout, weight, pre, *, stream=0):
    """As matmul_gelu_backward_input0, any C."""
    engine.multiply(dinp, dout, weight, b_m_major=True, epilogue=SLOPE, extra=pre, tf32=0, stream=stream)


@matmul_gelu_backward_input.version(11, "the engine in TF32, GELU's slope on the way", precision="tf32", needs_cc=(8, 0))
def matmul_gelu_backward_input11(dinp, dout, weight, pre, *, stream=0):
    """As matmul_gelu_backward_input0, any C."""
    engine.multiply(dinp, dout, weight, b_m_major=True, epilogue=SLOPE, extra=pre, stream=stream)


@matmul_gelu_backward_input.version(12, "wgmma, weight transposed first", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_gelu_backward_input12(dinp, dout, weight, pre, *, stream=0):
    """As matmul_gelu_backward_input0; C and OC multiples of 4."""
    transposed = transpose(weight, stream)
    wgmma.multiply(dinp, dout, transposed, epilogue=SLOPE, extra=pre, stream=stream)


@matmul_gelu_backward_input.version(13, "wgmma fed by TMA, likewise", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_gelu_backward_input13(dinp, dout, weight, pre, *, stream=0):
    """As matmul_gelu_backward_input0; C and OC multiples of 4."""
    tma.multiply(dinp, dout, transpose(weight, stream), epilogue=SLOPE, extra=pre, stream=stream)


@matmul_gelu_backward_input.version(
    15, "three products of mma.sync, GELU's slope on the way", precision="3xtf32", needs_cc=(8, 0)
)
def matmul_gelu_backward_input15(dinp, dout, weight, pre, *, stream=0):
    """As matmul_gelu_backward_input0, any C."""
    engine.multiply(dinp, dout, weight, b_m_major=True, epilogue=SLOPE, extra=pre, tf32=3, stream=stream)


@matmul_gelu_backward_input.version(
    16, "three products of wgmma, likewise", precision="3xtf32", needs_cc=(9, 0), needs=wgmma.missing
)
def matmul_gelu_backward_input16(dinp, dout, weight, pre, *, stream=0):
    """As matmul_gelu_backward_input0; C and OC multiples of 4."""
    transposed = transpose(weight, stream, rounded=False)
    tma.multiply(dinp, dout, transposed, epilogue=SLOPE, extra=pre, tf32=3, stream=stream)


@cuda.jit(cache=True, fastmath=True)
def matmul_backward_weight_kernel1(dweight, dout, inp, accumulate):
    c, o = cuda.grid(2)
    OC, C = dweight.shape
    if o < OC and c < C:
        total = dweight[o, c] if accumulate else float32(0)
        for n in range(inp.shape[0]):
            total += dout[n, o] * inp[n, c]
        dweight[o, c] = total


@matmul_backward_weight.version(1, "a thread an element of dweight")
def matmul_backward_weight1(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight0."""
    OC, C = dweight.shape
    matmul_backward_weight_kernel1[(ceil_div(C, 32), ceil_div(OC, 8)), (32, 8), stream](dweight, dout, inp, accumulate)


@matmul_backward_weight.version(2, "the smaller operand transposed, then cuBLASLt", precision="either", needs=cublas.missing)
def matmul_backward_weight2(dweight, dout, inp, accumulate, *, tf32=True, stream=0):
    """As matmul_backward_weight0; C, OC and N multiples of 4. What is summed over, N, lies along no row of dout or inp."""
    need(engine.is_aligned(dweight, dout, inp) and len(inp) % 4 == 0, "needs N, C and OC in multiples of 4")
    OC, C = dweight.shape
    smaller = transpose(inp if C <= OC else dout, stream, rounded=tf32)
    dweight, dout, inp, smaller = map(cublas.Matrix.of, (dweight, dout, inp, smaller))
    add = dweight if accumulate else None
    if C <= OC:
        cublas.product(dweight, dout, smaller, trans_a=True, trans_b=True, add=add, tf32=tf32, stream=stream)
    else:
        cublas.product(dweight, smaller, inp, add=add, tf32=tf32, stream=stream)


@matmul_backward_weight.version(8, "the engine in fp32, the rows split among blocks where there are few tiles", needs_cc=(8, 0))
def matmul_backward_weight8(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight0."""
    epilogue = ADD if accumulate else STORE
    engine.multiply(
        dweight, dout, inp, a_m_major=True, b_m_major=True, epilogue=epilogue, extra=dweight, tf32=0, stream=stream
    )


@matmul_backward_weight.version(10, "the engine in TF32", precision="tf32", needs_cc=(8, 0))
def matmul_backward_weight10(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight0."""
    epilogue = ADD if accumulate else STORE
    engine.multiply(dweight, dout, inp, a_m_major=True, b_m_major=True, epilogue=epilogue, extra=dweight, stream=stream)


def multiply_weight(multiply, dweight, dout, inp, accumulate, stream, rounded=True):
    """dweight = dout.T @ inp, or its transpose as inp.T @ dout, stored the other way round: so that the smaller operand is the one
    that is transposed first. multiply: an engine's."""
    OC, C = dweight.shape
    a, b = (dout, inp) if C <= OC else (inp, dout)
    multiply(
        dweight, a, transpose(b, stream, rounded), a_m_major=True, transposed=C > OC,
        epilogue=ADD if accumulate else STORE, extra=dweight, stream=stream,
    )  # fmt: skip


@matmul_backward_weight.version(12, "wgmma, one operand transposed first", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_backward_weight12(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight0; C, OC and N multiples of 4."""
    multiply_weight(wgmma.multiply, dweight, dout, inp, accumulate, stream)


@matmul_backward_weight.version(13, "wgmma fed by TMA, likewise", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_backward_weight13(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight12."""
    multiply_weight(tma.multiply, dweight, dout, inp, accumulate, stream)


@matmul_backward_weight.version(
    14, "version 2 or 13, the faster at the shape", precision="tf32", needs_cc=(9, 0), needs=missing, chooses=True
)
def matmul_backward_weight14(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight2."""
    versions = matmul_backward_weight2, matmul_backward_weight13
    faster_of(versions, dweight, dout, inp, accumulate, may_run=not accumulate, stream=stream)


@matmul_backward_weight.version(
    15, "fp32's digits from three products of mma.sync", precision="3xtf32", needs_cc=(8, 0)
)
def matmul_backward_weight15(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight0."""
    epilogue = ADD if accumulate else STORE
    engine.multiply(
        dweight, dout, inp, a_m_major=True, b_m_major=True, epilogue=epilogue, extra=dweight, tf32=3, stream=stream
    )


@matmul_backward_weight.version(
    16, "fp32's digits from three of wgmma, one operand transposed", precision="3xtf32", needs_cc=(9, 0), needs=wgmma.missing
)
def matmul_backward_weight16(dweight, dout, inp, accumulate, *, stream=0):
    """As matmul_backward_weight12."""
    three_products = functools.partial(tma.multiply, tf32=3)
    multiply_weight(three_products, dweight, dout, inp, accumulate, stream, rounded=False)
