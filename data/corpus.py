"""From text to a data set: PREFIX_train.bin and PREFIX_val.bin, two token files; and which one the trainer takes."""

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.files import DATA_FOLDER, DataError, shown, write_tokens, writing_tokens
from data.tokenizer import END_OF_TEXT, encode

TINY_SHAKESPEARE = DATA_FOLDER / "tiny_shakespeare"
PYDOC_TOPICS = DATA_FOLDER / "pydoc_topics"


def token_files(prefix: str | Path) -> tuple[Path, Path]:
    """Returns the paths of a data set's training and validation tokens."""
    return Path(f"{prefix}_train.bin"), Path(f"{prefix}_val.bin")


def prepare(documents: Iterable[str], prefix: str | Path, val_tokens: int) -> tuple[int, int]:
    """Writes the two token files: each document begins with an end-of-text token, the first val_tokens of all validate.
    Returns the numbers of training and of validation tokens. Raises DataError where the text is too short."""
    tokens: list[int] = []
    for document in documents:
        tokens.append(END_OF_TEXT)
        tokens += encode(document)
    if len(tokens) <= val_tokens:
        raise DataError(
            f"the text for {prefix} has {len(tokens):,} tokens, more than {val_tokens:,} are needed: give a longer one"
        )
    train, val = token_files(prefix)
    with writing_tokens(val, np.array(tokens[:val_tokens])):  # both or neither: half of two data sets is none
        write_tokens(train, np.array(tokens[val_tokens:]))
    return len(tokens) - val_tokens, val_tokens


def require(prefix: str | Path) -> tuple[Path, Path]:
    """Returns the data set's training and validation files. Raises DataError where one is missing."""
    script = "pydoc_corpus.py" if Path(prefix).name == PYDOC_TOPICS.name else "tinyshakespeare.py"
    made = PYDOC_TOPICS if script == "pydoc_corpus.py" else TINY_SHAKESPEARE
    for path in token_files(prefix):
        if not path.is_file():
            raise DataError(
                f"{path} is missing: run `python data/{script}`, it makes -i data/{made.name}"
                "; without -i the trainer takes a text that is always there"
            )
    return token_files(prefix)


def default_prefix(seconds: float = 5.0) -> tuple[str, str]:
    """Returns the data set to train on where none is named, and a note on it (empty for tiny Shakespeare at hand).

    Tiny Shakespeare where its files are there; else it is downloaded, for at most so many seconds; else Python's own
    help topics, which are always there. Raises DataError where data/ cannot be written.
    """
    if all(path.is_file() for path in token_files(TINY_SHAKESPEARE)):
        return shown(TINY_SHAKESPEARE), ""

    from data import pydoc_corpus, tinyshakespeare  # here, as most runs need neither, nor an HTTP client

    finished = threading.Event()

    def attempt() -> None:
        with contextlib.suppress(Exception):  # whatever goes wrong, there is another corpus
            tinyshakespeare.fetch(limit=seconds, quiet=True)
            finished.set()

    # A thread, as looking up a host's name has no time limit of its own.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if finished.is_set():
        tinyshakespeare.prepare_text(tinyshakespeare.TEXT_FILE, TINY_SHAKESPEARE)
        return shown(TINY_SHAKESPEARE), "prepared now"
    if not all(path.is_file() for path in token_files(PYDOC_TOPICS)):
        pydoc_corpus.prepare_topics(PYDOC_TOPICS)
    return shown(PYDOC_TOPICS), "tiny_shakespeare unreachable"
