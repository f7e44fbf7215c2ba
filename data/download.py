"""A download that can be resumed: what has come stays in PATH.part, and the next call asks for the rest."""

import argparse
import contextlib
import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data.files import DataError, shown


def download(
    url: str,
    path: str | Path,
    *,
    limit: float | None = None,
    stall: float = 20.0,
    sha256: str | None = None,
    quiet: bool = False,
    instead: str = "",
) -> None:
    """Downloads url to path, unless path is there already.

    limit: seconds in all (looked at after each read), stall: seconds without a byte, after which it gives up;
    sha256: what the file must have; quiet: no progress bar; instead: what else an error tells the user to try.
    Raises DataError.
    """
    path = Path(path)
    if path.exists():
        return
    part = path.with_name(path.name + ".part")
    otherwise = f", or {instead}" if instead else ""
    try:
        file = open(part, "ab")
    except OSError as error:
        raise DataError(f"cannot write {shown(part)} ({error.strerror}): make its folder writable{otherwise}") from None
    try:
        with file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two that append to one file would spoil it
            with progress_bar(path.name, quiet) as advance:
                fetch_rest(url, file, limit, stall, advance)
        if sha256 is not None and hashlib.sha256(part.read_bytes()).hexdigest() != sha256:
            part.unlink()
            raise DataError(f"what {url} sent is not the published file (its SHA-256 is wrong): try again{otherwise}")
        os.replace(part, path)
    except BlockingIOError:
        raise DataError(f"{shown(part)} is being downloaded by another process: wait for it, or stop it") from None
    except urllib.error.HTTPError as error:
        raise DataError(f"cannot download {url} (HTTP {error.code} {error.reason}): try later{otherwise}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # a URLError wraps what happened
        reason = getattr(reason, "strerror", None) or reason
        raise DataError(
            f"cannot download {url} to {shown(path)} ({reason}): run it again to go on{otherwise}"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            if part.stat().st_size == 0:
                part.unlink()


Advance = Callable[[int, int | None], None]  # called with the bytes that have come, and those there will be


def fetch_rest(url: str, file: BinaryIO, limit: float | None, stall: float, advance: Advance) -> None:
    """Appends to file what it lacks of url. Raises OSError (TimeoutError, HTTPError, ...) or HTTPException."""
    deadline = None if limit is None else time.monotonic() + limit
    done = file.tell()
    request = urllib.request.Request(url, headers={"User-Agent": "llm.numba"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=stall if limit is None else min(stall, limit))
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers["Content-Range"] == f"bytes */{done}":
            return  # nothing is lacking: only the new name was
        if error.code == 416:  # it holds more than there is, so it is of another file
            restart(file)
            return fetch_rest(url, file, limit, stall, advance)
        raise
    with response:
        if not (response.headers["Content-Range"] or "").startswith(f"bytes {done}-"):
            restart(file)  # the server sends all of it
            done = 0
        total = done + response.length if response.length is not None else None
        advance(done, total)
        while chunk := response.read1(1 << 16):
            file.write(chunk)
            done += len(chunk)
            advance(done, total)
            if deadline is not None and time.monotonic() > deadline and done != total:
                raise TimeoutError(f"stopped after {limit:g} s with {done:,} of {total or 'unknown':,} bytes")
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended at {done:,} of {total:,} bytes")


def restart(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


@contextlib.contextmanager
def progress_bar(name: str, quiet: bool) -> Iterator[Advance]:
    """Yields a function that draws a bar on stderr, or does nothing where quiet."""
    if quiet:
        yield lambda done, total: None
        return
    columns = TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=None)
        try:
            yield lambda done, total: progress.update(task, completed=done, total=total)
        except BaseException:
            progress.live.transient = True  # no bar, and no empty line, stays above the error
            progress.live.stop()
            progress.disable = True
            raise


def positive_seconds(text: str) -> float:
    """A flag's value."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
