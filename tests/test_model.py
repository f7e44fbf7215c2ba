"""The whole model against PyTorch: logits, loss, every gradient by name, the losses of ten AdamW steps.

tests/golden is in the repository (make_golden.py writes it, from PyTorch in float64); where the folder of
LLM_NUMBA_FIXTURES, or shared/fixtures beside the repository, holds gpt2_tiny.*, that is checked as well (float32).
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from data.checkpoint import parameter_shapes, read_checkpoint, read_debug_state
from model import GPT2, Tensors

HERE = Path(__file__).parent
FIXTURES = Path(os.environ.get("LLM_NUMBA_FIXTURES") or HERE.parent.parent / "shared" / "fixtures")
MODELS = {"gpt2_golden": HERE / "golden", "gpt2_tiny": FIXTURES}
FP32, TF32 = 1e-5, 2e-3  # of the norm
BACKENDS = {
    "cpu": (FP32, {"device": "cpu"}),
    "cpu-recompute": (FP32, {"device": "cpu", "recompute": True}),
    "cuda": (TF32, {"device": "cuda"}),
    "cuda-fp32": (FP32, {"device": "cuda", "tf32": False}),
    "cuda-fp32-recompute": (FP32, {"device": "cuda", "tf32": False, "recompute": True}),
    "cuda-fp32-unfused": (FP32, {"device": "cuda", "tf32": False, "fused": False}),
    "cuda-fp32-no-graph": (FP32, {"device": "cuda", "tf32": False, "graph": False}),
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


def test_batches_of_other_shapes_in_between_change_nothing(case):
    model = case.model()
    before = model.forward(case.x, case.y)
    B, T = case.x.shape
    assert np.isfinite(model.forward(case.x[:1, : T // 2], case.y[:1, : T // 2]))
    larger = np.tile(case.x, (3, 1))
    case.assert_agrees(model.forward(larger, np.tile(case.y, (3, 1))), case.truth.loss, "loss of the batch three times")
    assert model.forward(case.x, case.y) == before
    model.backward()
    ours = by_name(case, model, model.grads.buffer)["qkvw"]
    case.assert_agrees(ours, by_name(case, model, case.truth.grads)["qkvw"], "the gradient of qkvw")


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


def test_more_tokens_than_positions_are_refused(case):
    too_long = np.zeros((1, case.config.max_seq_len + 1), np.int32)
    with pytest.raises(ValueError, match=f"max_seq_len, {case.config.max_seq_len}: lower -t"):
        case.model().forward(too_long)
