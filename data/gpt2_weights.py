"""The published GPT-2 weights as a checkpoint of llm.c's: gpt2_124M.bin and so on, for train_gpt2_fp32.py -e.

    python data/gpt2_weights.py                    downloads the 124M model (548 MB) and writes gpt2_124M.bin
    python data/gpt2_weights.py 355M               or 774M, 1558M
    python data/gpt2_weights.py --file FILE        takes the weights from a file in the published layout

The published file (safetensors) keeps a tensor a layer and matrices as (in, out), "Conv1D"; the checkpoint stacks the
layers and keeps matrices as (out, in), and pads the vocabulary with rows of zeros to a multiple of 128.
"""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # a script's own folder is there: the repo's root should be
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all else is imported: no traceback

import numpy as np
from safetensors import SafetensorError, safe_open

from data.checkpoint import GPT2Config, parameter_shapes, write_checkpoint
from data.download import download, positive_seconds
from data.files import DATA_FOLDER, Arguments, DataError, is_one_of, run_script, shown

REPOSITORIES = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}
URL = "https://huggingface.co/openai-community/{}/resolve/main/model.safetensors"
CONFIGS = {
    "124M": GPT2Config(1024, 50257, 50304, 12, 12, 768),
    "355M": GPT2Config(1024, 50257, 50304, 24, 16, 1024),
    "774M": GPT2Config(1024, 50257, 50304, 36, 20, 1280),
    "1558M": GPT2Config(1024, 50257, 50304, 48, 25, 1600),
}
HEAD_SIZE = 64  # of every published size
# Ours -> the published name, {} being the layer; those of matrices that are stored the other way round end in "^T".
PUBLISHED = {
    "wte": "wte.weight",
    "wpe": "wpe.weight",
    "ln1w": "h.{}.ln_1.weight",
    "ln1b": "h.{}.ln_1.bias",
    "qkvw": "h.{}.attn.c_attn.weight^T",
    "qkvb": "h.{}.attn.c_attn.bias",
    "attprojw": "h.{}.attn.c_proj.weight^T",
    "attprojb": "h.{}.attn.c_proj.bias",
    "ln2w": "h.{}.ln_2.weight",
    "ln2b": "h.{}.ln_2.bias",
    "fcw": "h.{}.mlp.c_fc.weight^T",
    "fcb": "h.{}.mlp.c_fc.bias",
    "fcprojw": "h.{}.mlp.c_proj.weight^T",
    "fcprojb": "h.{}.mlp.c_proj.bias",
    "lnfw": "ln_f.weight",
    "lnfb": "ln_f.bias",
}


class PublishedWeights:
    """A file of GPT-2 weights in the published layout, whose names may begin with "transformer."."""

    def __init__(self, path: str | Path):
        """Raises DataError where the file is missing or no safetensors file."""
        self.path = path
        try:
            self.file = safe_open(path, framework="numpy")
        except FileNotFoundError:
            raise DataError(f"{path} is missing: leave --file out to download the weights") from None
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} is not a whole safetensors file ({error}): download it again") from None
        self.names = {name.removeprefix("transformer."): name for name in self.file.keys()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises DataError where there is no such tensor."""
        if name not in self.names:
            raise DataError(f"{self.path} has no tensor {name}: it is not a GPT-2 model in the published layout")
        return tuple(self.file.get_slice(self.names[name]).get_shape())

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the tensor as float32. Raises DataError where it is missing, or of another shape or no float type."""
        if self.shape(name) != shape:
            raise DataError(f"{self.path}: {name} has shape {self.shape(name)}, GPT-2 of this size has {shape}")
        dtype = self.file.get_slice(self.names[name]).get_dtype()
        if dtype not in ("F16", "F32", "F64"):
            raise DataError(f"{self.path}: {name} is of type {dtype}, convert the file to float32 first")
        return self.file.get_tensor(self.names[name]).astype(np.float32, copy=False)

    def config(self, num_heads: int | None = None) -> GPT2Config:
        """Returns the sizes, which the tensors tell but for the number of heads: C / 64 where not given."""
        for name in ("wte.weight", "wpe.weight"):
            if len(self.shape(name)) != 2:
                raise DataError(f"{self.path}: {name} has shape {self.shape(name)}, GPT-2's is a matrix")
        V, C = self.shape("wte.weight")
        max_seq_len = self.shape("wpe.weight")[0]
        layers = {int(match[1]) for name in self.names if (match := re.match(r"h\.(\d+)\.", name))}
        num_heads = num_heads or max(1, C // HEAD_SIZE)
        if min(max_seq_len, V, C, len(layers)) == 0 or C % num_heads != 0:
            sizes = f"max_seq_len {max_seq_len}, V {V}, {len(layers)} layers, C {C} and {num_heads} heads"
            raise DataError(f"{self.path}: {sizes} are no GPT-2: see --heads")
        if missing := set(range(len(layers))) - layers:
            raise DataError(f"{self.path} lacks layer {min(missing)} of {len(layers)}: download it again")
        Vp = -(-V // 128) * 128
        return GPT2Config(max_seq_len, V, Vp, len(layers), num_heads, C)

    def parameters(self, config: GPT2Config) -> Iterator[np.ndarray]:
        """Yields the checkpoint's parameters in their order, a tensor of a layer at a time. Raises DataError."""
        for ours, shape in parameter_shapes(config).items():
            published, transposed = PUBLISHED[ours].removesuffix("^T"), PUBLISHED[ours].endswith("^T")
            if ours == "wte":
                wte = self.tensor(published, (config.vocab_size, config.channels))
                if "lm_head.weight" in self.names and (self.tensor("lm_head.weight", wte.shape) != wte).any():
                    raise DataError(f"{self.path}: lm_head.weight is not wte.weight, which GPT-2 uses for both")
                yield wte
                yield np.zeros((config.padded_vocab_size - config.vocab_size, config.channels), np.float32)
            elif "{}" not in published:
                yield self.tensor(published, shape)
            else:
                for layer in range(config.num_layers):
                    stored = self.tensor(published.format(layer), shape[:0:-1] if transposed else shape[1:])
                    yield stored.T if transposed else stored


def convert(source: str | Path, path: str | Path, config: GPT2Config) -> None:
    """Writes the checkpoint path from the safetensors file source. Raises DataError."""
    write_checkpoint(path, config, PublishedWeights(source).parameters(config))


def main() -> None:
    parser = Arguments(description="Writes the published GPT-2 weights as a checkpoint, for train_gpt2_fp32.py -e.")
    parser.add_argument("size", nargs="?", choices=CONFIGS, help="which to download (124M), or what --file must hold")
    parser.add_argument("--file", help="a local model.safetensors: download nothing")
    parser.add_argument("--heads", type=int, help="number of heads of a --file that is no published size (C / 64)")
    parser.add_argument("--out", help="the checkpoint to write (gpt2_SIZE.bin at the repo's root)")
    parser.add_argument("--time-limit", type=positive_seconds, metavar="S", help="of the download (none)")
    args = parser.parse_args()
    if args.heads is not None and args.heads <= 0:
        parser.error(f"--heads {args.heads} is not above 0")

    size = args.size
    if args.file is None:
        size = size or "124M"
        source = DATA_FOLDER / f"gpt2_{size}.safetensors"
        url = URL.format(REPOSITORIES[size])
        download(url, source, limit=args.time_limit, instead="give a file with --file FILE")
    else:
        source = args.file
    config = PublishedWeights(source).config(args.heads)
    if size is not None and config != CONFIGS[size]:
        raise DataError(f"{source} is not GPT-2 {size}, it has {config}: leave the size out, or give another file")
    size = size or next((name for name, known in CONFIGS.items() if known == config), None)
    if args.out is None and size is None:
        parser.error(f"{source} is no published size: say with --out where to write it")
    path = Path(args.out) if args.out is not None else DATA_FOLDER.parent / f"gpt2_{size}.bin"
    if is_one_of(path, [source]):
        parser.error(f"--out {path} is the --file that it reads: name another")
    convert(source, path, config)
    if args.file is None:
        source.unlink()  # the checkpoint holds all of it
    print(f"{shown(path)}: {config.num_parameters:,} parameters, {config}")


if __name__ == "__main__":
    run_script(main)
