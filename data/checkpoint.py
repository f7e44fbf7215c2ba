"""llm.c's checkpoint and debug state, both ways; the one table of GPT-2's parameters.

checkpoint:  header 20240326, 3, max_seq_len, V, L, NH, C, Vp; then the parameters, float32, in the table's order
debug state: header 20240327, 2, B, T; then x, y int32 (B, T); logits float32 (B, T, V); the loss, float32;
             the gradients as the parameters
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.files import HEADER_BYTES, DataError, Format, replacing

CHECKPOINT = Format(
    "checkpoint",
    20240326,
    3,
    "`python data/gpt2_weights.py` makes gpt2_124M.bin, and -e d12 starts from random weights",
)
DEBUG_STATE = Format("debug state", 20240327, 2, "write it again with data.checkpoint.write_debug_state")


@dataclass(frozen=True)
class GPT2Config:
    """GPT-2's sizes; llm.c's names for them are maxT, V, Vp, L, NH, C. Vp is V rounded up, so that rows are aligned."""

    max_seq_len: int
    vocab_size: int
    padded_vocab_size: int
    num_layers: int
    num_heads: int
    channels: int

    @property
    def num_parameters(self) -> int:
        """The padding's rows of wte count, as they do in llm.c."""
        return sum(prod(shape) for shape in parameter_shapes(self).values())


def parameter_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Returns the parameters' shapes by name, in the order they have in memory and in a checkpoint."""
    L, C = config.num_layers, config.channels
    return {
        "wte": (config.padded_vocab_size, C),
        "wpe": (config.max_seq_len, C),
        "ln1w": (L, C),
        "ln1b": (L, C),
        "qkvw": (L, 3 * C, C),
        "qkvb": (L, 3 * C),
        "attprojw": (L, C, C),
        "attprojb": (L, C),
        "ln2w": (L, C),
        "ln2b": (L, C),
        "fcw": (L, 4 * C, C),
        "fcb": (L, 4 * C),
        "fcprojw": (L, C, 4 * C),
        "fcprojb": (L, C),
        "lnfw": (C,),
        "lnfb": (C,),
    }


def read_checkpoint(path: str | Path) -> tuple[GPT2Config, np.ndarray]:
    """Returns the config and the parameters, float32 (num_parameters,), mapped into memory and read-only.
    Raises DataError."""
    max_seq_len, V, L, NH, C, Vp = (int(value) for value in CHECKPOINT.read_header(path)[2:8])
    config = GPT2Config(max_seq_len, V, Vp, L, NH, C)
    if min(astuple(config)) <= 0 or V > Vp or C % NH != 0:
        raise DataError(
            f"{path}: its header says max_seq_len {max_seq_len}, V {V}, Vp {Vp}, L {L}, NH {NH}, C {C}, "
            f"which cannot be: {CHECKPOINT.remedy}"
        )
    CHECKPOINT.check_size(path, 4 * config.num_parameters)
    parameters = np.memmap(path, "<f4", mode="r", offset=HEADER_BYTES, shape=(config.num_parameters,))
    return config, np.asarray(parameters)


def write_checkpoint(path: str | Path, config: GPT2Config, parameters: np.ndarray | Iterable[np.ndarray]) -> None:
    """parameters: float32 (num_parameters,), or arrays that are it piece by piece, so that a large model can stream."""
    pieces = [parameters] if isinstance(parameters, np.ndarray) else parameters
    c = config
    with replacing(path) as file:
        file.write(
            CHECKPOINT.pack_header(
                c.max_seq_len, c.vocab_size, c.num_layers, c.num_heads, c.channels, c.padded_vocab_size
            )
        )
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, "<f4").data)
        written = (file.tell() - HEADER_BYTES) // 4
        if written != config.num_parameters:
            raise ValueError(f"{path}: {written:,} parameters given, the config has {config.num_parameters:,}")


class DebugState(NamedTuple):
    """A batch and what the model makes of it: inputs x and targets y, int32 (B, T); logits, float32 (B, T, V);
    the mean loss; the gradients, float32 (num_parameters,)."""

    x: np.ndarray
    y: np.ndarray
    logits: np.ndarray
    loss: float
    grads: np.ndarray


def read_debug_state(path: str | Path, config: GPT2Config) -> DebugState:
    """config: of the checkpoint that it belongs to, as the file does not hold the model's sizes. Raises DataError."""
    B, T = (int(value) for value in DEBUG_STATE.read_header(path)[2:4])
    if B <= 0 or T <= 0:
        raise DataError(f"{path}: its header says B {B}, T {T}, which cannot be: {DEBUG_STATE.remedy}")
    V = config.vocab_size
    DEBUG_STATE.check_size(path, 4 * (2 * B * T + B * T * V + 1 + config.num_parameters))
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        x = np.fromfile(file, "<i4", B * T).reshape(B, T)
        y = np.fromfile(file, "<i4", B * T).reshape(B, T)
        logits = np.fromfile(file, "<f4", B * T * V).reshape(B, T, V)
        loss = float(np.fromfile(file, "<f4", 1)[0])
        return DebugState(x, y, logits, loss, np.fromfile(file, "<f4", config.num_parameters))


def write_debug_state(path: str | Path, state: DebugState) -> None:
    """Writes what read_debug_state reads."""
    with replacing(path) as file:
        file.write(DEBUG_STATE.pack_header(*state.x.shape))
        for array, dtype in zip(state, ("<i4", "<i4", "<f4", "<f4", "<f4"), strict=True):
            file.write(np.ascontiguousarray(array, dtype).data)
