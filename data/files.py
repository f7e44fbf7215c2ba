"""llm.c's binary files: a header of 256 int32, then the data, all little-endian.

Here is what they share (errors, headers, writing that leaves no half file) and the simplest of them, the token file:
header 20240520, 1, count; then count uint16 tokens. The checkpoint is in checkpoint.py.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, TextIO

import numpy as np

HEADER_BYTES = 256 * 4
MAX_TOKEN_COUNT = 2**31 - 1  # the header holds the count as an int32
DATA_FOLDER = Path(__file__).resolve().parent


class DataError(Exception):
    """Bad input. Its message is one line that names the file and says what to do; scripts print it and exit with 1."""


@dataclass(frozen=True)
class Format:
    """A kind of file: what an error calls it, its first two numbers, and what to do about a bad one."""

    name: str
    magic: int
    version: int
    remedy: str

    def read_header(self, path: str | Path) -> np.ndarray:
        """Returns the header, int32 (256,), whose magic and version are right. Raises DataError."""
        try:
            with open(path, "rb") as file:
                raw = file.read(HEADER_BYTES)
        except FileNotFoundError:
            raise DataError(f"{path} is missing: {self.remedy}") from None
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror or error}): {self.remedy}") from None
        if not raw:
            raise DataError(f"{path} is empty: {self.remedy}")
        if len(raw) < 4 or int.from_bytes(raw[:4], "little") != self.magic:
            raise DataError(f"{path} is not a {self.name} (it does not begin with {self.magic}): {self.remedy}")
        if len(raw) < HEADER_BYTES:
            raise DataError(f"{path} is truncated, {len(raw)} bytes of its header's {HEADER_BYTES}: {self.remedy}")
        header = np.frombuffer(raw, "<i4")
        if header[1] != self.version:
            raise DataError(
                f"{path} is a {self.name} of version {header[1]}, version {self.version} is read: {self.remedy}"
            )
        return header

    def check_size(self, path: str | Path, data_bytes: int) -> None:
        """Raises DataError where the file is not its header and data_bytes long."""
        size, expected = os.path.getsize(path), HEADER_BYTES + data_bytes
        if size != expected:
            fault = "truncated" if size < expected else "too long"
            raise DataError(f"{path} is {fault}, {size:,} bytes where its header says {expected:,}: {self.remedy}")

    def pack_header(self, *values: int) -> bytes:
        """Returns the header's bytes: magic, version, values, zeros."""
        header = np.zeros(256, "<i4")
        header[: 2 + len(values)] = (self.magic, self.version, *values)
        return header.tobytes()


TOKENS = Format("token file", 20240520, 1, "`python data/tinyshakespeare.py` makes data/tiny_shakespeare_*.bin")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside path and gives it path's name once all is written, so that a process that is
    killed leaves the old file or none, never half a one. Raises DataError where path cannot be written."""
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"  # with_name refuses / and the empty name
    try:
        if path.exists() and not path.is_file():  # a device, say: another file must not take its place
            raise OSError("it is no regular file")
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(
            f"cannot write {path} ({error.strerror or error}): check its folder and the free space"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def is_one_of(path: str | Path, files: Iterable[str | Path]) -> bool:
    """Whether path is one of these files, under whatever name: what is read must not be written over."""
    return os.path.exists(path) and any(os.path.exists(file) and os.path.samefile(path, file) for file in files)


def write_text(path: str | Path, text: str) -> None:
    """Gives path this content, all at once. Raises DataError."""
    with replacing(path) as file:
        file.write(text.encode())


def read_json(path: str | Path, remedy: str) -> dict:
    """Raises DataError where path is no file of a JSON object; remedy: what to do then."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{shown(path)} cannot be read as JSON ({error}): {remedy}") from None
    if not isinstance(found, dict):
        raise DataError(f"{shown(path)} holds no JSON object: {remedy}")
    return found


def read_tokens(path: str | Path) -> np.ndarray:
    """Returns the file's tokens, uint16 (count,), mapped into memory and read-only. Raises DataError."""
    count = int(TOKENS.read_header(path)[2])
    if count <= 0:
        raise DataError(f"{path} has no tokens, its header says {count}: {TOKENS.remedy}")
    TOKENS.check_size(path, 2 * count)
    return np.asarray(np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(count,)))


def write_tokens(path: str | Path, tokens: np.ndarray) -> None:
    """tokens: integers (count,), each from 0 to 65535."""
    with writing_tokens(path, tokens):
        pass


@contextlib.contextmanager
def writing_tokens(path: str | Path, tokens: np.ndarray) -> Iterator[None]:
    """As write_tokens, but the file gets its name at the end of the block, and only if nothing failed there."""
    tokens = np.asarray(tokens)
    if not 0 < tokens.size <= MAX_TOKEN_COUNT or tokens.min() < 0 or tokens.max() > 0xFFFF:
        raise ValueError(f"a token file holds 1 to {MAX_TOKEN_COUNT:,} tokens, each from 0 to 65535")
    with replacing(path) as file:
        file.write(TOKENS.pack_header(tokens.size))
        file.write(np.ascontiguousarray(tokens, "<u2").data)
        file.flush()
        yield


def check_tokens(tokens: np.ndarray, vocab_size: int, path: str | Path) -> None:
    """Raises DataError, naming path and the first token that is outside the vocabulary, where there is one."""
    step = 1 << 24  # a chunk at a time, so that a file larger than memory can be checked
    for start in range(0, tokens.size, step):
        chunk = tokens[start : start + step]
        if chunk.max() >= vocab_size:
            at = int(np.argmax(chunk >= vocab_size))
            raise DataError(
                f"{path}: token {chunk[at]} at position {start + at:,} is outside the model's vocabulary of "
                f"{vocab_size:,}: tokenize the text with the model's own vocabulary, or start from another model (-e)"
            )


def shown(path: str | Path) -> str:
    """Returns path as a person would type it: relative where it is below the working directory."""
    path, here = Path(path).resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


class Arguments(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit with 1, as all bad input here."""

    def error(self, message: str) -> None:
        sys.exit(f"{self.prog}: {message} (--help shows the flags)")


def heed_ctrl_c() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt. A call of LLVM's back into Python would swallow that: it comes again."""

    def unraisable(what) -> None:
        if what.exc_type is KeyboardInterrupt:
            threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        else:
            sys.__unraisablehook__(what)

    sys.unraisablehook = unraisable
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_by_ctrl_c(line: str, file: TextIO | None) -> NoReturn:
    """Prints the line and ends with 130, at once: Python's own way out crashes, now and then, in an LLVM that was interrupted,
    and a second Ctrl-C would show a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # whoever read our lines may have gone
        if sys.stdout:
            sys.stdout.flush()  # what was printed before is not lost
        print(f"\n{line}", file=file, flush=True)
    os._exit(130)


def flush_output() -> None:
    """Where what was printed cannot leave, ends with 1, in one line: Python's own way out says it in two, and ends with 120."""
    try:
        if sys.stdout and not sys.stdout.closed:
            sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # whoever read our lines has gone: nobody is left to tell
    except OSError as error:
        print(f"error: what is printed cannot be written ({error.strerror}): check where it goes", file=sys.stderr, flush=True)
        os._exit(1)


def run_script(main: Callable[[], None]) -> None:
    """Runs main; bad input ends it with one line and exit status 1, Ctrl-C with one line and 130."""
    heed_ctrl_c()
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        end_by_ctrl_c("stopped: run it again to go on", sys.stderr)
    except BrokenPipeError:
        os._exit(1)  # whoever read our lines has gone: nobody is left to tell
    except OSError as error:
        sys.exit(f"error: {error}")
    finally:
        flush_output()
