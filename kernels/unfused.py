"""The fused ops as what they are made of: for `--fused 0` on the trainer, for a card on which a fused one has no version, and for
the tests of the fused ones."""

from kernels.device import scratch
from kernels.op import OPS, Picked


class Unfused:
    """A namespace of ops like the one it wraps, whose fused ops call the simple ones one after the other."""

    def __init__(self, ops):
        self.ops = ops

    def __getattr__(self, name: str):
        return getattr(self.ops, name)

    def fused_residual_forward(self, residual, out, mean, rstd, inp1, inp2, weight, bias):
        self.ops.residual_forward(_flat(residual), _flat(inp1), _flat(inp2))
        self.ops.layernorm_forward(out, mean, rstd, residual, weight, bias)

    def fused_residual_backward(self, dresidual, dweight, dbias, dprojb, dout, residual, weight, mean, rstd):
        self.ops.layernorm_backward(dresidual, dweight, dbias, dout, residual, weight, mean, rstd)
        self.ops.matmul_backward_bias(dprojb, dresidual)

    def matmul_gelu_forward(self, out, pre, inp, weight, bias):
        self.ops.matmul_forward(pre, inp, weight, bias)
        self.ops.gelu_forward(_flat(out), _flat(pre))

    def matmul_residual_forward(self, out, inp, weight, bias, residual):
        product = scratch("unfused", out.shape)
        self.ops.matmul_forward(product, inp, weight, bias)
        self.ops.residual_forward(_flat(out), _flat(residual), _flat(product))

    def matmul_gelu_backward_input(self, dinp, dout, weight, pre):
        dgelu = scratch("unfused", dinp.shape)
        self.ops.matmul_backward_input(dgelu, dout, weight)
        self.ops.gelu_backward(_flat(dinp), _flat(pre), _flat(dgelu))


def fused_where_possible(ops: Picked, fused: bool = True) -> Picked | Unfused:
    """The ops; unfused if asked for, or if a fused one has no version that can run here, as before Ampere without cuBLAS."""
    can_run = all(ops.ladder(name) for name in vars(Unfused) if name in OPS)
    return ops if fused and can_run else Unfused(ops)


def _flat(array):
    return array.reshape(array.size)
