"""The data loader of llm.c's train_gpt2_fp32.cu: batches in the order of the file, and from the start again."""

from pathlib import Path

import numpy as np

from data.files import DataError, check_tokens, read_tokens


class DataLoader:
    """Cuts a token file into batches of B rows of T tokens.

    A batch needs B*T + 1 tokens, as a row's targets are its inputs moved by one; the next one starts B*T further.
    num_batches counts whole B*T in the file: where the last of them lacks its last target, the first comes in its
    place, as in llm.c.
    """

    def __init__(self, path: str | Path, B: int, T: int, vocab_size: int | None = None):
        """vocab_size: the model's V; a file with a token outside it is refused. Raises DataError."""
        self.path, self.B, self.T = path, B, T
        self.tokens = read_tokens(path)
        if self.tokens.size < B * T + 1:
            raise DataError(
                f"{path} has {self.tokens.size:,} tokens, a batch needs B*T+1 = {B * T + 1:,}: lower -b or -t"
            )
        if vocab_size is not None:
            check_tokens(self.tokens, vocab_size, path)
        self.num_batches = self.tokens.size // (B * T)
        self.position = 0  # of the next batch's first token

    def reset(self) -> None:
        """The next batch is the file's first."""
        self.position = 0

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets, int32 (B, T) each."""
        size = self.B * self.T
        if self.position + size + 1 > self.tokens.size:
            self.reset()
        batch = self.tokens[self.position : self.position + size + 1].astype(np.int32)
        self.position += size
        return batch[:-1].reshape(self.B, self.T), batch[1:].reshape(self.B, self.T)
