"""Published GPT-2 weights become a checkpoint, checked on a small file in the published layout."""

import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data import gpt2_weights
from data.checkpoint import parameter_shapes, read_checkpoint
from data.files import DataError
from data.gpt2_weights import CONFIGS, PUBLISHED, PublishedWeights, convert

REPO = Path(__file__).resolve().parents[1]
V, MAX_T, L, NH, C = 300, 16, 3, 2, 8


def published_tensors() -> dict[str, np.ndarray]:
    """The tensors of a small GPT-2, under the names and in the shapes of the published files."""
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (V, C), "wpe.weight": (MAX_T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for layer in range(L):
        for name, shape in {
            "ln_1.weight": (C,),
            "ln_1.bias": (C,),
            "attn.bias": (1, 1, MAX_T, MAX_T),  # the causal mask, no parameter
            "attn.c_attn.weight": (C, 3 * C),
            "attn.c_attn.bias": (3 * C,),
            "attn.c_proj.weight": (C, C),
            "attn.c_proj.bias": (C,),
            "ln_2.weight": (C,),
            "ln_2.bias": (C,),
            "mlp.c_fc.weight": (C, 4 * C),
            "mlp.c_fc.bias": (4 * C,),
            "mlp.c_proj.weight": (4 * C, C),
            "mlp.c_proj.bias": (C,),
        }.items():
            shapes[f"h.{layer}.{name}"] = shape
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def views(path: Path) -> dict[str, np.ndarray]:
    config, parameters = read_checkpoint(path)
    shapes = parameter_shapes(config)
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    pieces = np.split(parameters, ends[:-1])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


@pytest.mark.parametrize("begin", ["", "transformer."])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_every_tensor_finds_its_place(tmp_path, begin, dtype):
    tensors = {name: tensor.astype(dtype) for name, tensor in published_tensors().items()}
    saved = {begin + name: tensor for name, tensor in tensors.items()}
    if begin:
        saved["lm_head.weight"] = tensors["wte.weight"]
    save_file(saved, tmp_path / "model.safetensors")
    config = PublishedWeights(tmp_path / "model.safetensors").config(num_heads=NH)
    assert astuple(config) == (MAX_T, V, 384, L, NH, C)
    convert(tmp_path / "model.safetensors", tmp_path / "model.bin", config)

    p = views(tmp_path / "model.bin")
    np.testing.assert_array_equal(p["wte"][:V], tensors["wte.weight"])
    assert not p["wte"][V:].any()
    np.testing.assert_array_equal(p["wpe"], tensors["wpe.weight"])
    for layer in range(L):
        for ours, theirs in {
            "qkv": "attn.c_attn",
            "attproj": "attn.c_proj",
            "fc": "mlp.c_fc",
            "fcproj": "mlp.c_proj",
        }.items():
            np.testing.assert_array_equal(p[ours + "w"][layer], tensors[f"h.{layer}.{theirs}.weight"].T)
            np.testing.assert_array_equal(p[ours + "b"][layer], tensors[f"h.{layer}.{theirs}.bias"])
        for ours, theirs in {"ln1": "ln_1", "ln2": "ln_2"}.items():
            np.testing.assert_array_equal(p[ours + "w"][layer], tensors[f"h.{layer}.{theirs}.weight"])
            np.testing.assert_array_equal(p[ours + "b"][layer], tensors[f"h.{layer}.{theirs}.bias"])
    np.testing.assert_array_equal(p["lnfw"], tensors["ln_f.weight"])
    np.testing.assert_array_equal(p["lnfb"], tensors["ln_f.bias"])


def test_every_parameter_has_a_published_name():
    assert list(PUBLISHED) == list(parameter_shapes(CONFIGS["124M"]))


@pytest.mark.parametrize(("size", "parameters"), [("124M", 124_439_808), ("355M", 354_823_168), ("774M", 774_030_080)])
def test_the_published_sizes(size, parameters):
    config = CONFIGS[size]
    assert config.num_parameters == parameters + 47 * config.channels  # 47 rows of padding
    assert config.channels == 64 * config.num_heads and config.padded_vocab_size == 50304


def damaged(name: str, tensor: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors = published_tensors() | {name: tensor}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        (damaged("h.2.mlp.c_fc.bias", None), "has no tensor h.2.mlp.c_fc.bias"),
        (damaged("wte.weight", None), "has no tensor wte.weight"),
        (damaged("h.1.mlp.c_fc.weight", np.zeros((4 * C, C), np.float32)), r"has shape \(32, 8\), .* has \(8, 32\)"),
        (damaged("wte.weight", np.zeros(C, np.float32)), r"wte.weight has shape \(8,\), GPT-2's is a matrix"),
        (damaged("ln_f.bias", np.zeros(C, np.int32)), "ln_f.bias is of type I32"),
        (damaged("lm_head.weight", np.zeros((V, C), np.float32)), "lm_head.weight is not wte.weight"),
    ],
)
def test_a_wrong_tensor_is_named_and_nothing_is_written(tmp_path, tensors, fault):
    source = tmp_path / "model.safetensors"
    save_file(tensors, source)
    with pytest.raises(DataError, match=fault) as error:
        convert(source, tmp_path / "model.bin", PublishedWeights(source).config(NH))
    assert str(source) in str(error.value)
    assert list(tmp_path.iterdir()) == [source]


def script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, REPO / "data" / "gpt2_weights.py", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_the_script_converts_a_local_file(tmp_path):
    save_file(published_tensors(), tmp_path / "model.safetensors")
    result = script("--file", "model.safetensors", "--heads", "2", "--out", "small.bin", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout.startswith("small.bin: 5,832 parameters")
        and read_checkpoint(tmp_path / "small.bin")[0].num_heads == NH
    )


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--file", "none.safetensors"], "error: none.safetensors is missing: leave --file out to download"),
        (["--file", "text.safetensors"], "error: text.safetensors is not a whole safetensors file"),
        (["--file", "cut.safetensors"], "error: cut.safetensors is not a whole safetensors file"),
        (["--file", "model.safetensors"], "model.safetensors is no published size: say with --out where to write it"),
        (["124M", "--file", "model.safetensors"], "error: model.safetensors is not GPT-2 124M"),
        (["--file", "model.safetensors", "--heads", "3"], "C 8 and 3 heads are no GPT-2: see --heads"),
        (["--file", "model.safetensors", "--heads", "0"], "--heads 0 is not above 0"),
        (["--file", "model.safetensors", "--out", "none/x.bin"], "error: cannot write none/x.bin"),
        (["--file", "model.safetensors", "--out", "./model.safetensors"], "--out model.safetensors is the --file that it reads"),
        (["--file", "model.safetensors", "--out", "model.safetensors/"], "--out model.safetensors is the --file that it reads"),
        (["99M"], "argument size: invalid choice: '99M'"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_1(tmp_path, arguments, fault):
    save_file(published_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "text.safetensors").write_text("once upon a time, there was no tensor")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-4])
    result = script(*arguments, cwd=tmp_path)
    assert result.returncode == 1 and fault in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not list(tmp_path.glob("**/*.bin"))
    assert load_file(tmp_path / "model.safetensors"), "what it read is what it was"


def test_a_download_is_converted_and_removed(tmp_path, monkeypatch, capsys):
    def download(url, path, **options):
        assert url == "https://huggingface.co/openai-community/gpt2-medium/resolve/main/model.safetensors"
        save_file(published_tensors(), path)

    monkeypatch.setattr(gpt2_weights, "download", download)
    monkeypatch.setattr(gpt2_weights, "DATA_FOLDER", tmp_path)
    monkeypatch.setitem(gpt2_weights.CONFIGS, "355M", gpt2_weights.GPT2Config(MAX_T, V, 384, L, 1, C))
    monkeypatch.setattr(sys, "argv", ["gpt2_weights.py", "355M", "--out", str(tmp_path / "gpt2_355M.bin")])
    gpt2_weights.main()
    assert "gpt2_355M.bin: 5,832 parameters" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [tmp_path / "gpt2_355M.bin"]
