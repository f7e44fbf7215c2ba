"""GPT-2, forward, backward and update, over two backends that share every line but the calls of the ops.

On the CPU `ops` is the module cpu_reference; on a GPU it is the picked version of every kernel (kernels.op.Picked). Both
have the same functions, outputs first. Parameters, their gradients and AdamW's moments are one buffer each, in llm.c's
order; tensors are views of it, made once. N stands for B*T rows; L, NH, C, V, Vp are llm.c's.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path

import numpy as np

from data.checkpoint import GPT2Config, parameter_shapes, read_checkpoint, write_checkpoint

V, VP, MAX_SEQ_LEN = 50257, 50304, 1024
SIZES = {  # name: layers, heads, channels
    "d2": (2, 2, 128),
    "d4": (4, 4, 256),
    "d6": (6, 6, 384),
    "d12": (12, 12, 768),
    "d24": (24, 16, 1024),
    "d36": (36, 20, 1280),
    "d48": (48, 25, 1600),
}

# What a pass overwrites need not be zeroed. These gradients are added to, by reductions over rows.
ADDED_TO = ("wpe", "ln1w", "ln1b", "qkvb", "attprojb", "ln2w", "ln2b", "fcb", "fcprojb", "lnfw", "lnfb")
ALIGNMENT = 32  # floats: every activation starts on a 128-byte line
ONCE = (
    "wte",
    "wpe",
    "lnfw",
    "lnfb",
    "encoded",
    "projection",
    "lnf",
    "lnf_mean",
    "lnf_rstd",
    "logits",
)  # the rest: L times


def config_of_size(size: str) -> GPT2Config:
    L, NH, C = SIZES[size]
    return GPT2Config(MAX_SEQ_LEN, V, VP, L, NH, C)


def activation_shapes(config: GPT2Config, B: int, T: int, recompute: bool) -> dict[str, tuple[int, ...]]:
    """What the forward pass keeps for the backward, in the order in which it is computed; (L, ...) where every layer has
    its own. With `recompute` the GELU's output is not kept: one buffer serves all layers, and the backward fills it again.
    """
    L, NH, C, N = config.num_layers, config.num_heads, config.channels, B * T
    return {
        "encoded": (N, C),
        "ln1": (L, N, C),
        "ln1_mean": (L, N),
        "ln1_rstd": (L, N),
        "qkv": (L, N, 3 * C),
        "lse": (L, B, NH, T),
        "atty": (L, N, C),
        "residual2": (L, N, C),
        "ln2": (L, N, C),
        "ln2_mean": (L, N),
        "ln2_rstd": (L, N),
        "fch": (L, N, 4 * C),
        "fch_gelu": (1 if recompute else L, N, 4 * C),
        "residual3": (L, N, C),
        "projection": (N, C),  # attproj and fcproj are needed only until they are added to the residual stream
        "lnf": (N, C),
        "lnf_mean": (N,),
        "lnf_rstd": (N,),
        "logits": (N, config.padded_vocab_size),  # the classifier turns them into their gradient, in place
    }


def gradient_shapes(config: GPT2Config, N: int) -> dict[str, tuple[int, ...]]:
    """The backward pass holds one gradient of each kind, whatever the number of layers."""
    C = config.channels
    return {"residual": (N, C), "norm": (N, C), "hidden": (N, 4 * C), "qkv": (N, 3 * C)}


def padded_size(shapes: dict[str, tuple[int, ...]], alignment: int = ALIGNMENT) -> int:
    return sum(-(-math.prod(shape) // alignment) * alignment for shape in shapes.values())


class Tensors:
    """Named views of one buffer, in a table's order: `t.wte`, and for what each of `stacked` layers has, `t.qkvw[layer]`."""

    def __init__(self, buffer, shapes: dict[str, tuple[int, ...]], stacked: int = 0, alignment: int = 1):
        self.buffer, self.shapes, self.spans = buffer, shapes, {}
        start = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            self.spans[name] = (start, start + size)
            whole = buffer[start : start + size]
            if stacked and name not in ONCE:
                rest = size // shape[0]
                layers = [whole[i * rest : (i + 1) * rest].reshape(shape[1:]) for i in range(shape[0])]
                setattr(self, name, layers * (stacked // shape[0]))  # what is there once serves every layer
            else:
                setattr(self, name, whole.reshape(shape))
            start += -(-size // alignment) * alignment

    def adjoining(self, names: tuple[str, ...]) -> list:
        """As few views as cover these tensors: neighbours in the buffer are one."""
        runs: list[list[int]] = []
        for start, end in sorted(self.spans[name] for name in names):
            if runs and runs[-1][1] == start:
                runs[-1][1] = end
            else:
                runs.append([start, end])
        return [self.buffer[start:end] for start, end in runs]

    def layer_by_layer(self) -> Iterator[tuple[str, object]]:
        """Every tensor after its name: in the table's order, but all that one layer has before what the next has."""
        for once, names in groupby(self.shapes, ONCE.__contains__):
            names = list(names)
            if once:
                yield from ((name, getattr(self, name)) for name in names)
            else:
                layers = range(len(getattr(self, names[0])))
                yield from ((f"{name} of layer {l}", getattr(self, name)[l]) for l in layers for name in names)


class GPT2:
    """The model. `report` is told what is allocated, as llm.c prints it; nothing is allocated before it is needed."""

    def __init__(
        self,
        config: GPT2Config,
        parameters,
        device: str,
        *,
        recompute: bool = False,
        report: Callable = print,
        **options,
    ):
        self.config, self.recompute, self.report = config, recompute, report
        self.backend = make_backend(device, **options)
        self.ops = self.backend.ops
        self.params = Tensors(
            self._allocate(config.num_parameters, "model parameters"), parameter_shapes(config), config.num_layers
        )
        self.backend.upload(self.params.buffer, parameters)
        self.grads = self.moments = self.acts = None
        self._activations: dict[tuple[int, int], Tensors] = {}
        self._buffer = self._gradient_buffer = None

    @classmethod
    def from_checkpoint(cls, path: str | Path, device: str = "cpu", **options) -> "GPT2":
        """A model from llm.c's checkpoint file. Raises DataError."""
        config, parameters = read_checkpoint(path)
        return cls(config, parameters, device, **options)

    @classmethod
    def random(cls, size: str | GPT2Config, device: str = "cpu", seed: int = 1337, **options) -> "GPT2":
        """Random weights as GPT-2 starts: normal of deviation 0.02, the projections into the residual stream smaller by
        sqrt(2 L); unit layernorm weights, zero biases, zero rows in the padding of the vocabulary."""
        config = size if isinstance(size, GPT2Config) else config_of_size(size)
        return cls(config, random_parameters(config, seed), device, **options)

    def save(self, path: str | Path) -> None:
        """Writes llm.c's checkpoint file."""
        write_checkpoint(path, self.config, self.backend.download(self.params.buffer))

    @property
    def grad_norm(self) -> float:
        """Of all gradients together, as the last update saw them; not finite where one of them is not."""
        return math.sqrt(self.norm_squared.host[0])

    @property
    def num_parameters(self) -> int:
        return self.config.num_parameters

    def _allocate(self, size: int, what: str, dtype=np.float32):
        self.report(f"allocated {size * 4 >> 20} MiB for {what}")
        return self.backend.empty(size, dtype, what)

    def _prepare(self, B: int, T: int) -> Tensors:
        """The activations for this batch shape: views of one buffer, which is as large as the largest so far needs."""
        if (B, T) in self._activations:
            return self._activations[B, T]
        shapes = activation_shapes(self.config, B, T, self.recompute)
        if self._buffer is not None and self._most_rows < B * T:  # the old and the new might not fit side by side
            self._activations.clear()
            self.acts = self._buffer = self._gradient_buffer = None
            give_back(self.backend)
        if self._buffer is None:
            self._buffer = self._allocate(padded_size(shapes), "activations")
            self._most_rows = B * T
        acts = Tensors(self._buffer, shapes, self.config.num_layers, ALIGNMENT)
        acts.B, acts.T, acts.gradients = B, T, None
        acts.inputs, acts.targets = (self.backend.staged((B, T), np.int32) for _ in range(2))
        acts.losses = self.backend.staged(B * T, np.float32)
        acts.encoded3 = acts.encoded.reshape((B, T, self.config.channels))
        acts.qkv3 = [qkv.reshape((B, T, 3 * self.config.channels)) for qkv in acts.qkv]
        acts.atty3 = [atty.reshape((B, T, self.config.channels)) for atty in acts.atty]
        acts.flat_targets = acts.targets.device.reshape(B * T)
        acts.flat_fch = [fch.reshape(fch.size) for fch in acts.fch]
        acts.flat_gelu = [gelu.reshape(gelu.size) for gelu in acts.fch_gelu]
        self._activations[B, T] = acts
        return acts

    def _prepare_backward(self, acts: Tensors) -> None:
        c, shape = self.config, (acts.B, acts.T)
        if self.grads is None:
            self.grads = Tensors(
                self._allocate(c.num_parameters, "parameter gradients"), parameter_shapes(c), c.num_layers
            )
            self.to_zero = self.grads.adjoining(ADDED_TO)
        if self._gradient_buffer is None:  # for all batches that the activations' buffer is large enough for
            size = padded_size(gradient_shapes(c, self._most_rows))
            self._gradient_buffer = self._allocate(size, "activation gradients")
        if acts.gradients is None:
            shapes = gradient_shapes(c, acts.B * acts.T)
            acts.gradients = d = Tensors(self._gradient_buffer, shapes, alignment=ALIGNMENT)
            d.residual3 = d.residual.reshape((*shape, c.channels))
            d.norm3 = d.norm.reshape((*shape, c.channels))
            d.qkv3 = d.qkv.reshape((*shape, 3 * c.channels))

    def _prepare_update(self) -> None:
        if self.moments is None:
            self.moments = []
            for name in "mv":
                self.moments.append(self._allocate(self.num_parameters, f"AdamW optimizer state {name}"))
                self.backend.zero(self.moments[-1])
            self.step_number = self.backend.staged(1, np.int32)
            self.learning_rate, self.grad_scale, self.norm_squared = (
                self.backend.staged(1, np.float32) for _ in range(3)
            )

    # ---- the passes: what is queued here is what a captured graph replays ----

    def _forward(self, acts: Tensors, with_loss: bool) -> None:
        c, p, ops = self.config, self.params, self.ops
        self.backend.push(acts.inputs)
        ops.encoder_forward(acts.encoded3, acts.inputs.device, p.wte, p.wpe)
        ops.layernorm_forward(acts.ln1[0], acts.ln1_mean[0], acts.ln1_rstd[0], acts.encoded, p.ln1w[0], p.ln1b[0])
        for l in range(c.num_layers):
            residual = acts.residual3[l - 1] if l else acts.encoded
            ops.matmul_forward(acts.qkv[l], acts.ln1[l], p.qkvw[l], p.qkvb[l])
            ops.attention_forward(acts.atty3[l], acts.lse[l], acts.qkv3[l], c.num_heads)
            ops.matmul_forward(acts.projection, acts.atty[l], p.attprojw[l], p.attprojb[l])
            ops.fused_residual_forward(
                acts.residual2[l],
                acts.ln2[l],
                acts.ln2_mean[l],
                acts.ln2_rstd[l],
                residual,
                acts.projection,
                p.ln2w[l],
                p.ln2b[l],
            )
            ops.matmul_gelu_forward(acts.fch_gelu[l], acts.fch[l], acts.ln2[l], p.fcw[l], p.fcb[l])
            ops.matmul_forward(acts.projection, acts.fch_gelu[l], p.fcprojw[l], p.fcprojb[l])
            if l + 1 < c.num_layers:
                norm = acts.ln1[l + 1], acts.ln1_mean[l + 1], acts.ln1_rstd[l + 1]
                weight, bias = p.ln1w[l + 1], p.ln1b[l + 1]
            else:
                norm = acts.lnf, acts.lnf_mean, acts.lnf_rstd
                weight, bias = p.lnfw, p.lnfb
            ops.fused_residual_forward(acts.residual3[l], *norm, acts.residual2[l], acts.projection, weight, bias)
        ops.matmul_forward(acts.logits, acts.lnf, p.wte, None)
        if with_loss:
            self.backend.push(acts.targets)
            ops.fused_classifier(
                acts.logits, acts.losses.device, 1.0 / (acts.B * acts.T), acts.flat_targets, c.vocab_size
            )
            self.backend.pull(acts.losses)

    def _backward(self, acts: Tensors) -> None:
        c, p, ops, d, g = self.config, self.params, self.ops, acts.gradients, self.grads
        for tensors in [*self.to_zero, d.residual]:
            self.backend.zero(tensors)
        aside, join = self.backend.aside, self.backend.join  # no layer waits for the weights' gradients
        last = c.num_layers - 1
        with aside(acts.logits):
            ops.matmul_backward_weight(g.wte, acts.logits, acts.lnf, False)
        ops.matmul_backward_input(d.norm, acts.logits, p.wte)
        ops.fused_residual_backward(
            d.residual,
            g.lnfw,
            g.lnfb,
            g.fcprojb[last],
            d.norm,
            acts.residual3[last],
            p.lnfw,
            acts.lnf_mean,
            acts.lnf_rstd,
        )
        for l in reversed(range(c.num_layers)):
            if self.recompute:
                ops.gelu_forward(acts.flat_gelu[l], acts.flat_fch[l])
            with aside(d.residual):
                ops.matmul_backward_weight(g.fcprojw[l], d.residual, acts.fch_gelu[l], False)
            join(d.hidden)
            ops.matmul_gelu_backward_input(d.hidden, d.residual, p.fcprojw[l], acts.fch[l])
            with aside(d.hidden):
                ops.matmul_backward_bias(g.fcb[l], d.hidden)
                ops.matmul_backward_weight(g.fcw[l], d.hidden, acts.ln2[l], False)
            ops.matmul_backward_input(d.norm, d.hidden, p.fcw[l])
            join(d.residual)
            ops.fused_residual_backward(
                d.residual, g.ln2w[l], g.ln2b[l], g.attprojb[l],
                d.norm, acts.residual2[l], p.ln2w[l], acts.ln2_mean[l], acts.ln2_rstd[l],
            )  # fmt: skip
            with aside(d.residual):
                ops.matmul_backward_weight(g.attprojw[l], d.residual, acts.atty[l], False)
            ops.matmul_backward_input(d.norm, d.residual, p.attprojw[l])
            join(d.qkv)
            ops.attention_backward(d.qkv3, d.norm3, acts.qkv3[l], acts.atty3[l], acts.lse[l], c.num_heads)
            with aside(d.qkv):
                ops.matmul_backward_bias(g.qkvb[l], d.qkv)
                ops.matmul_backward_weight(g.qkvw[l], d.qkv, acts.ln1[l], False)
            ops.matmul_backward_input(d.norm, d.qkv, p.qkvw[l])
            join(d.residual)
            norm = p.ln1w[l], acts.ln1_mean[l], acts.ln1_rstd[l]
            if l:
                ops.fused_residual_backward(
                    d.residual, g.ln1w[l], g.ln1b[l], g.fcprojb[l - 1], d.norm, acts.residual3[l - 1], *norm
                )
            else:
                ops.layernorm_backward(d.residual, g.ln1w[l], g.ln1b[l], d.norm, acts.encoded, *norm)
        join()
        ops.encoder_backward(g.wte, g.wpe, d.residual3, acts.inputs.device)

    def _update(self, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        for staged in (self.step_number, self.learning_rate, self.grad_scale):
            self.backend.push(staged)
        self.ops.global_norm_squared(self.norm_squared.device, self.grads.buffer)
        self.backend.pull(self.norm_squared)
        self.ops.adamw_update(
            self.params.buffer, self.grads.buffer, *self.moments,
            self.step_number.device, self.learning_rate.device, self.grad_scale.device, beta1, beta2, eps, weight_decay,
        )  # fmt: skip

    # ---- what the trainer calls ----

    def forward(self, inputs: np.ndarray, targets: np.ndarray | None = None) -> float | None:
        """inputs, targets: token ids (B, T). Returns the mean loss where there are targets; then acts.logits hold the
        logits' gradient."""
        acts = self._batch(inputs, targets)
        with_loss = targets is not None
        self.backend.run(("forward", acts.B, acts.T, with_loss), lambda: self._forward(acts, with_loss))
        return float(acts.losses.host.mean(dtype=np.float64)) if with_loss else None

    def backward(self) -> None:
        """The gradients of the batch that the last forward pass with targets saw, into `grads`."""
        acts = self.acts
        self._prepare_backward(acts)
        self.backend.run(("backward", acts.B, acts.T), lambda: self._backward(acts))

    def update(
        self,
        learning_rate: float,
        step: int,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        grad_scale: float = 1.0,
    ) -> None:
        """One step of AdamW, counted from 1; the gradients are multiplied by grad_scale first."""
        self._set_update(learning_rate, step, grad_scale)
        constants = (beta1, beta2, eps, weight_decay)
        self.backend.run(("update", *constants), lambda: self._update(*constants))

    def train_step(
        self, inputs: np.ndarray, targets: np.ndarray, learning_rate: float, step: int,
        beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0,
    ) -> float:  # fmt: skip
        """Forward, backward and update, one graph on a GPU. Returns the mean loss from before the update."""
        acts = self._batch(inputs, targets)
        self._prepare_backward(acts)
        self._set_update(learning_rate, step, 1.0)
        constants = (beta1, beta2, eps, weight_decay)

        def whole_step():
            self._forward(acts, with_loss=True)
            self._backward(acts)
            self._update(*constants)

        self.backend.run(("train", acts.B, acts.T, *constants), whole_step)
        return float(acts.losses.host.mean(dtype=np.float64))

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """The logits (V,) of the token that follows these, one sequence of 1 to max_seq_len tokens."""
        n = len(tokens)
        T = min(-(-n // 64) * 64, self.config.max_seq_len)  # few lengths, so few graphs; later tokens change nothing
        padded = np.zeros((1, T), np.int32)
        padded[0, :n] = tokens
        self.forward(padded)
        return self.backend.download(self.acts.logits[n - 1])[: self.config.vocab_size]

    def close(self) -> None:
        """Gives the memory back: of the model nothing is left to use."""
        backend = self.backend
        self.__dict__.clear()
        give_back(backend)

    def first_nonfinite(self) -> str:
        """Which tensor of the last step, in the order of computation, is the first to hold a NaN or an infinity: of the
        activations, then of the parameters' gradients, from the last parameter's to the first's."""
        named = [(f"activation {name}", tensor) for name, tensor in self.acts.layer_by_layer()]
        if self.grads:
            gradients = reversed(list(self.grads.layer_by_layer()))
            named += [(f"gradient of parameter {name}", tensor) for name, tensor in gradients]
        finite = ((name, np.isfinite(self.backend.download(tensor)).all()) for name, tensor in named)
        return next((name for name, is_finite in finite if not is_finite), "no tensor that is kept")

    def _batch(self, inputs: np.ndarray, targets: np.ndarray | None) -> Tensors:
        B, T = inputs.shape
        V = self.config.vocab_size
        if inputs.size == 0:
            raise ValueError(f"a batch of {B} sequences of {T} tokens is empty")
        for tokens in (inputs,) if targets is None else (inputs, targets):
            if tokens.min() < 0 or tokens.max() >= V:
                raise ValueError(f"this model knows the tokens 0 to {V - 1}, the batch has {tokens.min()} to {tokens.max()}")
        if T > self.config.max_seq_len:
            raise ValueError(f"T = {T} is above the model's max_seq_len, {self.config.max_seq_len}: lower -t")
        self.acts = acts = self._prepare(B, T)
        acts.inputs.host[...] = inputs
        if targets is not None:
            acts.targets.host[...] = targets
        return acts

    def _set_update(self, learning_rate: float, step: int, grad_scale: float) -> None:
        self._prepare_update()
        self.step_number.host[0], self.learning_rate.host[0], self.grad_scale.host[0] = step, learning_rate, grad_scale


def give_back(backend) -> None:
    """Frees what nobody refers to any more."""
    gc.collect()  # numba leaves cycles when it compiles, which hold frames of ours, and they what was dropped
    backend.forget()


def random_parameters(config: GPT2Config, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    flat = np.zeros(config.num_parameters, np.float32)
    tensors = Tensors(flat, parameter_shapes(config))
    for name, shape in tensors.shapes.items():
        tensor = getattr(tensors, name)
        if name in ("wte", "wpe") or (name.endswith("w") and not name.startswith("ln")):
            deviation = 0.02 / math.sqrt(2 * config.num_layers) if "proj" in name else 0.02
            rows = config.vocab_size if name == "wte" else shape[0]
            tensor[:rows] = deviation * rng.standard_normal((rows, *shape[1:]), dtype=np.float32)
        elif name.endswith("w"):
            tensor[...] = 1
    return flat


class Staged:
    """A small array that exists twice: `host`, which Python writes or reads, and `device`, which the ops take."""

    def __init__(self, host, device):
        self.host, self.device = host, device


class CpuBackend:
    """numpy arrays and cpu_reference: nothing is queued, nothing to copy."""

    def __init__(self):
        import cpu_reference

        self.ops = cpu_reference

    def empty(self, shape, dtype, what: str):
        return np.empty(shape, dtype)

    def staged(self, shape, dtype) -> Staged:
        array = np.zeros(shape, dtype)
        return Staged(array, array)

    def push(self, staged: Staged) -> None: ...

    def pull(self, staged: Staged) -> None: ...

    def upload(self, array, host: np.ndarray) -> None:
        array[...] = host

    def download(self, array) -> np.ndarray:
        return array.copy()

    def zero(self, array) -> None:
        array.fill(0)

    def aside(self, array) -> AbstractContextManager:
        return nullcontext()

    def join(self, array=None) -> None: ...

    def run(self, key: tuple, work: Callable[[], None]) -> None:
        work()

    def forget(self) -> None: ...


def make_backend(device: str, **options):
    """options, for the GPU alone: see kernels.cuda_backend.CudaBackend."""
    if device == "cpu":
        return CpuBackend()
    from kernels.cuda_backend import CudaBackend

    return CudaBackend(**options)
