"""GELU's gate, 0.5 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), by two fast instructions: what versions 3 and 4 of both
passes are made of, and the epilogues of the products.

    0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)),   exp(-2u) = 2^(-2u log2(e)) = 2^(x (LINEAR + CUBIC x^2))
"""

import math

from kernels.device import cuda, exp2_approx, float32, rcp_approx

SQRT_2_OVER_PI = float32(math.sqrt(2 / math.pi))  # float32 here, or the whole kernel computes in float64
LINEAR = float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
CUBIC = float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e) * 0.044715)


@cuda.jit(device=True, cache=True, fastmath=True)
def gelu_gate(x):
    """The gate, relative error below 1.2e-6 for |x| < 4, 1.2e-5 for |x| < 10: an error of the power, which has 24 bits and is up
    to 126, is one of the result."""
    return rcp_approx(float32(1) + exp2_approx(x * (LINEAR + CUBIC * x * x)))
