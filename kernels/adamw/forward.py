"""AdamW (Loshchilov and Hutter 2017): one step on all parameters.

    g = grads * grad_scale
    m = beta1 m + (1 - beta1) g               the mean of the gradient, and of its square
    v = beta2 v + (1 - beta2) g^2
    params -= learning_rate (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay params)

step, learning_rate and grad_scale are read from device memory, so that a captured graph can be launched again with new
ones.

version 1: a thread a parameter, which reads as the formulas do
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32, float64
from kernels.op import Op


def adamw_inputs(rng, N):
    return {
        "params": rng.standard_normal(N, dtype=np.float32),
        "grads": rng.standard_normal(N, dtype=np.float32),
        "m": rng.standard_normal(N, dtype=np.float32),
        "v": rng.random(N, dtype=np.float32),
        "step": np.array([10], np.int32),
        "learning_rate": np.array([1e-3], np.float32),
        "grad_scale": np.array([0.5], np.float32),
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
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
