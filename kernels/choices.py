"""Which of several ways to compute the same is the fastest at a shape: timed once, then read from a file of this card, so that the
same card gives the same bits, run after run."""

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path

from data.files import DataError, read_json, write_text
from kernels.device import ShapeError, card_name, cuda


class Choices:
    """Kept in a file of this folder. of: what is chosen among, as in "cublaslt-120900"."""

    def __init__(self, folder: Path, of: str):
        self.file = folder / f"{of}-{card_name().replace(' ', '-')}.json"
        self.known = self._read()

    def _read(self) -> dict[str, int]:
        """What is no choice, whoever wrote it, is measured anew."""
        try:
            found = read_json(self.file, "delete it")
        except DataError:
            return {}
        return {name: index for name, index in found.items() if type(index) is int}

    def index(self, key: tuple, run: Callable[..., None], count: int, stream, may_run: bool = True) -> int:
        """run(index, stream): computes the product with the candidate of an index. Where it must not run now (in a capture, or
        because the product adds to what is there), an unknown shape gets the first."""
        name = repr(key)
        if self.known.get(name) in range(count):
            return self.known[name]
        if count == 1 or not may_run or _is_captured(stream):
            return 0
        times = {}
        for index in range(count):
            try:
                times[index] = _time(functools.partial(run, index))
            except (RuntimeError, ShapeError):  # a candidate that does not run after all
                continue
        fastest = min(times, key=times.get, default=0)
        self.known |= self._read()  # what another process has chosen meanwhile stands
        if self.known.get(name) not in range(count):
            self.known[name] = fastest
        with contextlib.suppress(DataError):  # where it cannot be kept, the next process measures again
            write_text(self.file, json.dumps(self.known))
        return self.known[name]


def _time(run: Callable[[object], None], repeats: int = 5) -> float:
    """In a graph, as the trainer runs it: there the small fill that some algorithms begin with costs more than on a stream."""
    from cuda.core import Device

    cuda.synchronize()  # whoever reads what is overwritten now has done so
    run(0)  # outside of a capture first: the library may load a kernel
    cuda.synchronize()
    stream = Device(cuda.get_current_device().id).create_stream()
    builder, on = stream.create_graph_builder(), cuda.external_stream(int(stream.handle))
    builder.begin_building(mode="relaxed")
    for _ in range(repeats):
        run(on)
    graph = builder.end_building().complete()
    start, end = cuda.event(), cuda.event()
    graph.launch(stream)
    start.record(on)
    graph.launch(stream)
    end.record(on)
    end.synchronize()
    return cuda.event_elapsed_time(start, end)


def _is_captured(stream) -> bool:
    from cuda.bindings import driver

    error, status = driver.cuStreamIsCapturing(int(stream))
    return error != driver.CUresult.CUDA_SUCCESS or status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
