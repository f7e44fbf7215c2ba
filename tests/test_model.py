"""The whole model against PyTorch: logits, loss, every gradient by name, the losses of ten AdamW steps.

tests/golden is in the repository (make_golden.py writes it, from PyTorch in float64); where the folder of
LLM_NUMBA_FIXTURES, or shared/fixtures beside the repository, holds gpt2_tiny.*, that is checked as well (float32).
"""

import json
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from data.checkpoint import parameter_shapes, read_checkpoint, read_debug_state
from kernels.device import cuda
from model import GPT2, CpuBackend, Tensors

HERE = Path(__file__).parent
FIXTURES = Path(os.environ.get("LLM_NUMBA_FIXTURES") or HERE.parent.parent / "shared" / "fixtures")
MODELS = {"gpt2_golden": HERE / "golden", "gpt2_tiny": FIXTURES}
FP32, TF32 = 1e-5, 2e-3  # of the norm
BACKENDS = {
    "cpu": (FP32, {"device": "cpu"}),
    "cpu-recompute": (FP32, {"device": "cpu", "recompute": True}),
    "cuda": (TF32, {"device": "cuda"}),
    "cuda-3xtf32": (FP32, {"device": "cuda", "tf32": 3}),
    "cuda-fp32": (FP32, {"device": "cuda", "tf32": 0}),
    "cuda-fp32-recompute": (FP32, {"device": "cuda", "tf32": 0, "recompute": True}),
    "cuda-fp32-unfused": (FP32, {"device": "cuda", "tf32": 0, "fused": False}),
    "cuda-fp32-no-graph": (FP32, {"device": "cuda", "tf32": 0, "graph": False}),
}


class Case:
    """A model on a backend, a batch, and what PyTorch makes of them."""

    def __init__(self, name: str, backend: str):
        self.checkpoint = MODELS[name] / f"{name}.bin"
        if not self.checkpoint.exists():
            pytest.skip(f"there is no {self.checkpoint}")
        self.tolerance, self.options = BACKENDS[backend]
        self.config, _ = read_checkpoint(self.checkpoint)
        self.truth = read_debug_state(MODELS[name] / f"{name}_debug_state.bin", self.config)
        self.json = json.loads((MODELS[name] / f"{name}.json").read_text())
        self.x, self.y = self.truth.x, self.truth.y

    def model(self) -> GPT2:
        return GPT2.from_checkpoint(self.checkpoint, report=lambda line: None, **self.options)

    def assert_agrees(self, actual, truth, what: str):
        difference = np.linalg.norm(np.asarray(actual, np.float64) - truth)
        error = difference / (np.linalg.norm(truth) or 1)
        assert error <= self.tolerance, f"{what}: relative error {error:.1e}"

    def train(self, model: GPT2, step: int) -> float:
        adamw = self.json["adamw"]
        constants = [adamw[name] for name in ("beta1", "beta2", "eps", "weight_decay")]
        return model.train_step(self.x, self.y, adamw["lr"], step, *constants)


def by_name(case, model, buffer) -> dict[str, np.ndarray]:
    host = buffer if isinstance(buffer, np.ndarray) else model.backend.download(buffer)
    tensors = Tensors(host, parameter_shapes(case.config))
    return {name: getattr(tensors, name) for name in tensors.shapes}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture(params=[pytest.param(key, marks=[pytest.mark.gpu] * key.startswith("cuda")) for key in BACKENDS])
def case(name, request):
    return Case(name, request.param)


def test_logits_are_pytorchs(case):
    model = case.model()
    assert model.forward(case.x) is None
    logits = model.backend.download(model.acts.logits)[:, : case.config.vocab_size]
    case.assert_agrees(logits.reshape(case.truth.logits.shape), case.truth.logits, "logits")


def test_the_loss_and_every_gradient_are_pytorchs(case):
    model = case.model()
    for _ in range(
        3
    ):  # the second pass must not add to what the first left; on a GPU it is captured, the third replayed
        loss = model.forward(case.x, case.y)
        model.backward()
        case.assert_agrees(loss, case.truth.loss, "loss")
        ours, theirs = by_name(case, model, model.grads.buffer), by_name(case, model, case.truth.grads)
        for parameter in ours:
            case.assert_agrees(ours[parameter], theirs[parameter], f"the gradient of {parameter}")
        assert not ours["wte"][case.config.vocab_size :].any(), "the padding has a gradient"
        assert not ours["wpe"][case.x.shape[1] :].any(), "positions after the last have a gradient"


def test_the_losses_of_ten_steps_are_pytorchs(case):
    model = case.model()
    losses = [case.train(model, step) for step in range(1, 11)]
    case.assert_agrees(losses, case.json["losses_of_ten_steps"], "losses")


def test_the_norm_is_that_of_all_gradients(case):
    model = case.model()
    case.train(model, 1)
    case.assert_agrees(model.grad_norm, np.linalg.norm(case.truth.grads), "norm")


def test_two_trainings_are_the_same_to_the_bit(case):
    first, second = case.model(), case.model()
    for step in range(1, 4):
        assert case.train(first, step) == case.train(second, step)
    np.testing.assert_array_equal(*(model.backend.download(model.params.buffer) for model in (first, second)))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "cuda-fp32-recompute", "cuda-fp32-unfused", "cuda-fp32-no-graph"])
def test_what_runs_aside_changes_no_bit(name, backend):
    case = Case(name, backend)
    aside, in_order = case.model(), case.model()
    in_order.backend.overlap = False
    for step in range(1, 4):
        assert case.train(aside, step) == case.train(in_order, step)
    np.testing.assert_array_equal(*(model.backend.download(model.params.buffer) for model in (aside, in_order)))


@pytest.mark.gpu
def test_a_model_that_is_closed_takes_nothing_from_another(name):
    case = Case(name, "cuda")
    alone, left = case.model(), case.model()
    with_it = case.model()
    losses = [case.train(alone, step) for step in range(1, 6)]
    for step in range(1, 6):
        assert case.train(left, step) == losses[step - 1]
        if step < 4:
            case.train(with_it, step)
        if step == 4:
            with_it.close()
            cuda.to_device(np.full(1 << 24, np.nan, np.float32))  # where its memory was
    for model in (alone, left):
        model.close()


def test_a_step_is_forward_backward_and_update(case):
    whole, parts = case.model(), case.model()
    adamw = dict(case.json["adamw"])
    adamw.pop("applies_to", None)
    for step in range(1, 4):
        loss = parts.forward(case.x, case.y)
        parts.backward()
        parts.update(adamw["lr"], step, **{key: value for key, value in adamw.items() if key != "lr"})
        assert loss == case.train(whole, step)
    np.testing.assert_array_equal(*(model.backend.download(model.params.buffer) for model in (whole, parts)))


def test_a_scaled_gradient_moves_the_parameters_as_scaled_losses_would(case):
    """AdamW hardly feels the scale of a gradient; its moments do."""
    plain, scaled = case.model(), case.model()
    for model, scale in ((plain, 1.0), (scaled, 0.5)):
        model.forward(case.x, case.y)
        model.backward()
        model.update(1e-3, 1, grad_scale=scale)
    m, half_m = (model.backend.download(model.moments[0]) for model in (plain, scaled))
    np.testing.assert_allclose(half_m, m / 2, rtol=1e-5, atol=1e-12)


class Watched(CpuBackend):
    """The CPU, as careful as a GPU has to be: what was there when a pass was captured must be there when it is replayed.
    `most` is the most bytes that were alive at a time."""

    def __init__(self):
        super().__init__()
        self.buffers, self.captured, self.most = [], {}, 0

    def alive(self) -> list:
        return [buffer for buffer in (ref() for ref in self.buffers) if buffer is not None]

    def empty(self, shape, dtype, what):
        buffer = super().empty(shape, dtype, what)
        self.buffers.append(weakref.ref(buffer))
        self.most = max(self.most, sum(buffer.nbytes for buffer in self.alive()))
        return buffer

    def run(self, key, work):
        captured = self.captured.setdefault(key, [weakref.ref(buffer) for buffer in self.alive()])
        assert all(ref() is not None for ref in captured), f"{key} would be replayed into memory that was given back"
        work()

    def forget(self):
        super().forget()
        self.captured.clear()


def watched(model: GPT2) -> GPT2:
    if type(model.backend) is CpuBackend:
        model.backend = Watched()
    return model


def test_batches_of_other_shapes_in_between_change_nothing(case):
    model = watched(case.model())

    def loss_and_gradients(x, y):
        loss = model.forward(x, y)
        model.backward()
        return loss, model.backend.download(model.grads.buffer)

    before, expected = loss_and_gradients(case.x, case.y)
    T = case.x.shape[1]
    smaller = case.x[:1, : T // 2], case.y[:1, : T // 2]
    larger = np.tile(case.x, (3, 1)), np.tile(case.y, (3, 1))
    for x, y in (smaller, larger):
        for _ in range(3):  # on a GPU the second pass is captured, the third replayed
            loss, _ = loss_and_gradients(x, y)
            assert np.isfinite(loss)
            after, ours = loss_and_gradients(case.x, case.y)
            assert after == before
            np.testing.assert_array_equal(ours, expected)
    loss, gradients = loss_and_gradients(*larger)
    case.assert_agrees(loss, case.truth.loss, "loss of the batch three times")
    case.assert_agrees(gradients, case.truth.grads, "gradients of the batch three times")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_larger_batch_takes_no_more_memory_than_it_does_alone(name, recompute):
    case = Case(name, "cpu-recompute" if recompute else "cpu")

    def most_bytes(*batches: int) -> int:
        model = watched(case.model())
        for times in batches:
            model.train_step(np.tile(case.x, (times, 1)), np.tile(case.y, (times, 1)), 1e-3, 1)
        return model.backend.most

    assert most_bytes(2, 3) == most_bytes(3)


def test_after_a_batch_that_is_too_large_a_smaller_one_goes_on(name):
    case = Case(name, "cpu")
    model = watched(case.model())
    before = case.train(model, 1)
    allocate = model.backend.empty

    def refuse(shape, dtype, what):
        raise MemoryError(what)

    model.backend.empty = refuse
    with pytest.raises(MemoryError, match="activations"):
        model.forward(np.tile(case.x, (2, 1)))
    model.backend.empty = allocate
    assert case.train(model, 2) < before


def test_the_next_logits_are_the_last_rows(case):
    model = case.model()
    for n in (1, 5, case.x.shape[1]):
        case.assert_agrees(model.next_logits(case.x[0, :n]), case.truth.logits[0, n - 1], f"logits after {n} tokens")


def test_a_saved_model_goes_on_where_it_was(case, tmp_path):
    model = case.model()
    case.train(model, 1)
    model.save(tmp_path / "saved.bin")
    loaded = GPT2.from_checkpoint(tmp_path / "saved.bin", report=lambda line: None, **case.options)
    assert loaded.forward(case.x, case.y) == model.forward(case.x, case.y)


def test_tokens_that_the_model_does_not_know_are_refused(case):
    model, V, known = case.model(), case.config.vocab_size, np.zeros((1, 3), np.int32)
    for token in (-1, V):
        for batch in ((known + token, known), (known, known + token)):
            with pytest.raises(ValueError, match=f"this model knows the tokens 0 to {V - 1}, the batch has {token} to {token}"):
                model.train_step(*batch, 1e-3, 1)
    with pytest.raises(ValueError, match="a batch of 0 sequences of 3 tokens is empty"):
        model.train_step(known[:0], known[:0], 1e-3, 1)


def test_more_tokens_than_positions_are_refused(case):
    too_long = np.zeros((1, case.config.max_seq_len + 1), np.int32)
    with pytest.raises(ValueError, match=f"max_seq_len, {case.config.max_seq_len}: lower -t"):
        case.model().forward(too_long)


@pytest.mark.parametrize(
    "parameter, row, told",
    [
        ("wpe", (0,), "activation encoded"),
        ("qkvw", (0,), "activation qkv of layer 0"),
        ("qkvw", (1,), "activation qkv of layer 1"),
        ("fcprojb", (0,), "activation residual3 of layer 0"),
        ("lnfb", (), "activation lnf"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "cpu-recompute"])
def test_the_first_activation_that_is_no_number_is_named(backend, parameter, row, told):
    case = Case("gpt2_golden", backend)
    model = case.model()
    by_name(case, model, model.params.buffer)[parameter][row] = np.inf
    with np.errstate(invalid="ignore"):
        case.train(model, 1)
    assert model.first_nonfinite() == told


def test_the_first_gradient_that_is_no_number_is_named():
    case = Case("gpt2_golden", "cpu")
    model = case.model()
    case.train(model, 1)
    assert model.first_nonfinite() == "no tensor that is kept"
    g = model.grads
    last_to_first = [
        (g.wte, "wte"),  # whole only when the encoder has added to it, last of all
        (g.ln1w[0], "ln1w of layer 0"),
        (g.qkvw[0], "qkvw of layer 0"),
        (g.qkvb[0], "qkvb of layer 0"),
        (g.ln1w[1], "ln1w of layer 1"),
        (g.fcprojb[1], "fcprojb of layer 1"),
        (g.lnfw, "lnfw"),
    ]
    for gradient, told in last_to_first:
        gradient.fill(np.nan)
        assert model.first_nonfinite() == f"gradient of parameter {told}"
