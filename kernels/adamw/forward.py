"""AdamW (Loshchilov and Hutter 2017): one step on all parameters.

    g = grads * grad_scale
    m = beta1 m + (1 - beta1) g               the mean of the gradient, and of its square
    v = beta2 v + (1 - beta2) g^2
    params -= learning_rate (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay params)

step, learning_rate and grad_scale are read from device memory, so that a captured graph can be launched again with new
ones.

version 1: a thread a parameter, which reads as the formulas do
version 2: what all parameters share is computed once a block, in float64; the rest is fused multiply-adds
version 3: 16-byte loads and stores: a quarter of the memory instructions
version 4: loads and stores that do not stay in the cache, since nothing is touched twice
"""

import math

import numpy as np

import cpu_reference
from kernels.device import (
    ceil_div,
    cuda,
    float32,
    float64,
    load4,
    load4_streaming,
    multiprocessors,
    store4,
    store4_streaming,
)
from kernels.op import Op


def adamw_inputs(rng, N):
    """A step and an eps so large that a wrong one of either would show in the parameters."""
    return {
        "params": rng.standard_normal(N, dtype=np.float32),
        "grads": rng.standard_normal(N, dtype=np.float32),
        "m": rng.standard_normal(N, dtype=np.float32),
        "v": rng.random(N, dtype=np.float32),
        "step": np.array([10], np.int32),
        "learning_rate": np.array([0.1], np.float32),
        "grad_scale": np.array([0.5], np.float32),
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-2,
        "weight_decay": 0.1,
    }


adamw_update = Op(
    reference=cpu_reference.adamw_update,
    inputs=adamw_inputs,
    outputs=lambda N: {},
    changed=("params", "m", "v"),
    bytes_moved=lambda N: 28 * N,  # four arrays read, three written
    shape={"N": 124_475_904},
    small={"N": 1000},
    odd=[{"N": N} for N in (1, 3, 4, 129, 1027, 4099)],
    large=[{"N": 1 << 28}],
)


@cuda.jit(cache=True, fastmath=True)
def adamw_kernel1(params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay):
    i = cuda.grid(1)
    if i < params.size:
        g = grads[i] * grad_scale[0]
        m[i] = beta1 * m[i] + (float32(1) - beta1) * g
        v[i] = beta2 * v[i] + (float32(1) - beta2) * g * g
        m_hat = m[i] / (float32(1) - math.pow(beta1, float32(step[0])))
        v_hat = v[i] / (float32(1) - math.pow(beta2, float32(step[0])))
        params[i] -= learning_rate[0] * (m_hat / (math.sqrt(v_hat) + eps) + weight_decay * params[i])


@adamw_update.version(1, "a thread a parameter")
def adamw_update1(
    params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay, *, block_size=512, stream=0
):
    """params, grads, m, v: float32 (N,); step: int32 (1,), from 1; learning_rate, grad_scale: float32 (1,); all of these on
    the device; the others numbers."""
    numbers = np.float32(beta1), np.float32(beta2), np.float32(eps), np.float32(weight_decay)
    blocks = ceil_div(params.size, block_size)
    adamw_kernel1[blocks, block_size, stream](params, grads, m, v, step, learning_rate, grad_scale, *numbers)


@cuda.jit(device=True, cache=True)
def block_rates(step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay):
    """What all parameters of a step share, computed by the block's first thread, for everyone to see: the factors of

        m = keep1 m + take1 grads
        v = keep2 v + take2 grads^2
        params = keep params - rate m / (sqrt(v) + epsilon)

    The square root of v's bias correction goes into rate and epsilon."""
    rates = cuda.shared.array(8, float32)
    if cuda.threadIdx.x == 0:
        scale, lr, t = float64(grad_scale[0]), float64(learning_rate[0]), float64(step[0])
        root = math.sqrt(1.0 - math.pow(beta2, t))
        rates[0] = beta1
        rates[1] = (1.0 - beta1) * scale
        rates[2] = beta2
        rates[3] = (1.0 - beta2) * scale * scale
        rates[4] = 1.0 - lr * weight_decay
        rates[5] = lr * root / (1.0 - math.pow(beta1, t))
        rates[6] = eps * root
    cuda.syncthreads()
    return rates[0], rates[1], rates[2], rates[3], rates[4], rates[5], rates[6]


@cuda.jit(device=True, cache=True, fastmath=True)
def adamw(p, g, m, v, rates):
    """A parameter, its m and its v after the step."""
    keep1, take1, keep2, take2, keep, rate, epsilon = rates
    m = keep1 * m + take1 * g
    v = keep2 * v + take2 * g * g
    return keep * p - rate * m / (math.sqrt(v) + epsilon), m, v


@cuda.jit(cache=True, fastmath=True)
def adamw_kernel2(params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay):
    rates = block_rates(step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay)
    for i in range(cuda.grid(1), params.size, cuda.gridsize(1)):
        params[i], m[i], v[i] = adamw(params[i], grads[i], m[i], v[i], rates)


def resident_blocks(elements, block_size):
    """As many blocks as the card holds at once if a thread takes up to 40 registers, so that none waits for the others
    and each computes its rates once. Fewer for fewer elements."""
    return min(multiprocessors() * (1536 // block_size), ceil_div(elements, block_size))


@adamw_update.version(2, "bias corrections once a block in float64, fused multiply-adds")
def adamw_update2(
    params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay, *, block_size=512, stream=0
):
    """As version 1."""
    blocks = resident_blocks(params.size, block_size)
    numbers = float(beta1), float(beta2), float(eps), float(weight_decay)
    adamw_kernel2[blocks, block_size, stream](params, grads, m, v, step, learning_rate, grad_scale, *numbers)


@cuda.jit(device=True, cache=True, fastmath=True)
def adamw4(p, g, m, v, rates):
    """Four neighbouring parameters, their m and their v after the step."""
    p0, m0, v0 = adamw(p[0], g[0], m[0], v[0], rates)
    p1, m1, v1 = adamw(p[1], g[1], m[1], v[1], rates)
    p2, m2, v2 = adamw(p[2], g[2], m[2], v[2], rates)
    p3, m3, v3 = adamw(p[3], g[3], m[3], v[3], rates)
    return (p0, p1, p2, p3), (m0, m1, m2, m3), (v0, v1, v2, v3)


@cuda.jit(cache=True, fastmath=True, max_registers=40)
def adamw_kernel3(params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay):
    rates = block_rates(step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay)
    whole = params.size // 4 * 4
    for i in range(4 * cuda.grid(1), whole, 4 * cuda.gridsize(1)):
        p4, m4, v4 = adamw4(load4(params, i), load4(grads, i), load4(m, i), load4(v, i), rates)
        store4(params, i, *p4)
        store4(m, i, *m4)
        store4(v, i, *v4)
    i = whole + cuda.grid(1)
    if i < params.size:  # the last one to three
        params[i], m[i], v[i] = adamw(params[i], grads[i], m[i], v[i], rates)


@adamw_update.version(3, "16-byte loads and stores")
def adamw_update3(
    params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay, *, block_size=512, stream=0
):
    """As version 1; params, grads, m, v 16-byte aligned."""
    blocks = resident_blocks(ceil_div(params.size, 4), block_size)
    numbers = float(beta1), float(beta2), float(eps), float(weight_decay)
    adamw_kernel3[blocks, block_size, stream](params, grads, m, v, step, learning_rate, grad_scale, *numbers)


@cuda.jit(cache=True, fastmath=True, max_registers=40)
def adamw_kernel4(params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay):
    rates = block_rates(step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay)
    whole = params.size // 4 * 4
    for i in range(4 * cuda.grid(1), whole, 4 * cuda.gridsize(1)):
        p4 = load4_streaming(params, i)
        g4 = load4_streaming(grads, i)
        m4 = load4_streaming(m, i)
        v4 = load4_streaming(v, i)
        p4, m4, v4 = adamw4(p4, g4, m4, v4, rates)
        store4_streaming(params, i, *p4)
        store4_streaming(m, i, *m4)
        store4_streaming(v, i, *v4)
    i = whole + cuda.grid(1)
    if i < params.size:
        params[i], m[i], v[i] = adamw(params[i], grads[i], m[i], v[i], rates)


@adamw_update.version(4, "16-byte streaming loads and stores")
def adamw_update4(
    params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay, *, block_size=512, stream=0
):
    """As version 1; params, grads, m, v 16-byte aligned."""
    blocks = resident_blocks(ceil_div(params.size, 4), block_size)
    numbers = float(beta1), float(beta2), float(eps), float(weight_decay)
    adamw_kernel4[blocks, block_size, stream](params, grads, m, v, step, learning_rate, grad_scale, *numbers)
