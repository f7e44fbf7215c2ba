"""The GPU under model.py: memory, copies, the picked kernels, and CUDA graphs.

A launch from Python costs some 77 us of host time, and a training step is 300 launches. So the first time a pass runs it
runs as written; the second time it is captured into a graph; from then on it is one launch of a few microseconds.
Whatever changes from step to step (tokens, the step's number, the learning rate) is therefore read from device memory,
and its copy from page-locked host memory is a node of the graph too.

What nobody waits for, the weights' gradients, runs aside, on a second stream: the multiprocessors that the last blocks of
one kernel leave idle take the first ones of another. In a graph that is a branch.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kernels.device import TARGET, allocate, cuda, free_scratch, scratch_of, zero
from kernels.op import Picked
from kernels.pick import picks_for_this_card
from kernels.unfused import fused_where_possible
from model import Staged


class CudaBackend:
    """kernels: op name -> version number, before what was picked for this card. tf32: how many products of TF32 make one
    product: 0 keeps them all in fp32 arithmetic, 3 gives its digits. graph=False launches every kernel from Python, every
    time. fused=False uses the simple ops in place of fused ones. overlap=False runs all of a step in order, nothing aside."""

    def __init__(
        self, kernels: dict[str, int] | None = None, tf32: int = 1, graph: bool = True, fused: bool = True,
        overlap: bool = True,
    ):  # fmt: skip
        from cuda.core import Device, StreamOptions

        if TARGET != "gpu":
            raise RuntimeError("no CUDA GPU was found: use --device cpu")
        device = Device(cuda.get_current_device().id)
        device.set_current()
        priorities = -1, 0  # the main stream's blocks go first
        self.core_streams = [device.create_stream(options=StreamOptions(priority=priority)) for priority in priorities]
        self.stream, self.side = (cuda.external_stream(int(stream.handle)) for stream in self.core_streams)
        self.graph, self.overlap = graph, overlap
        self.scratch = object(), object()  # owners: of the main stream's launches, of those aside
        weakref.finalize(self, free_scratch, *self.scratch).atexit = False
        self.readers: dict[int, object] = {}  # id of an array -> the event after the last that reads it aside
        self.graphs: dict[tuple, object] = {}
        self.warm: set[tuple] = set()
        self.progress = None
        picks = {**picks_for_this_card(tf32), **(kernels or {})}
        self.picked = Picked(picks, stream=self.stream, tf32=tf32, watch=self._compiling)
        self.ops = fused_where_possible(self.picked, fused)

    def empty(self, shape, dtype, what: str):
        return allocate(shape, dtype, what)

    def staged(self, shape, dtype) -> Staged:
        host = cuda.pinned_array(shape, dtype)
        host[...] = 0
        return Staged(host, cuda.to_device(host))

    def push(self, staged: Staged) -> None:
        staged.device.copy_to_device(staged.host, stream=self.stream)

    def pull(self, staged: Staged) -> None:
        staged.device.copy_to_host(staged.host, stream=self.stream)

    def upload(self, array, host: np.ndarray) -> None:
        array.copy_to_device(np.ascontiguousarray(host))
        cuda.synchronize()

    def download(self, array) -> np.ndarray:
        self.stream.synchronize()
        return array.copy_to_host()

    def zero(self, array) -> None:
        zero(array, self.stream)

    @contextmanager
    def aside(self, array) -> Iterator[None]:
        """What is queued within it comes after what was queued before, and beside what follows. It reads `array`: whoever
        is to write there joins first."""
        if not self.overlap:
            with scratch_of(self.scratch[1]):  # the same as later, when a graph is captured and nothing can be allocated
                yield
            return
        now, done = cuda.event(timing=False), cuda.event(timing=False)
        now.record(self.stream)
        now.wait(self.side)
        self.picked.stream = self.side
        try:
            with scratch_of(self.scratch[1]):
                yield
        finally:
            self.picked.stream = self.stream
        done.record(self.side)
        self.readers[id(array)] = done

    def join(self, array=None) -> None:
        """Queue a wait for what reads `array` aside; for everything aside, if none is named."""
        for key in [id(array)] if array is not None else list(self.readers):
            if key in self.readers:
                self.readers.pop(key).wait(self.stream)

    def run(self, key: tuple, work: Callable[[], None]) -> None:
        """Queue the work and wait for it. What `key` names is the same work on the same memory every time."""
        with scratch_of(self.scratch[0]):
            self._run(key, work)
        self.stream.synchronize()

    def _run(self, key: tuple, work: Callable[[], None]) -> None:
        if key not in self.warm:
            with self._progress_bar(), self.in_order():
                work()
            self.warm.add(key)
        elif not self.graph:
            work()
        else:
            if key not in self.graphs:
                builder = self.core_streams[0].create_graph_builder()
                builder.begin_building(mode="relaxed")
                work()
                self.graphs[key] = builder.end_building().complete()
            self.graphs[key].launch(self.core_streams[0])

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Nothing aside: what is timed within it (cuBLAS's algorithms, a profile) has the GPU to itself."""
        before, self.overlap = self.overlap, False
        try:
            yield
        finally:
            self.overlap = before

    @contextmanager
    def _progress_bar(self) -> Iterator[None]:
        """Names what numba compiles; gone when all is done. With warm caches there is hardly time to see it."""
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("compiling {task.description}, {task.completed} done"), TimeElapsedColumn()
        console = Console(stderr=True)
        hidden = not console.is_interactive  # rich would leave an empty line where stderr is no terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as self.progress:
            self.task = self.progress.add_task("kernels")
            try:
                yield
            finally:
                self.progress = None

    def _compiling(self, op: str) -> None:
        if self.progress:
            self.progress.update(self.task, description=op, advance=1)

    def forget(self) -> None:
        """Once memory that graphs point to has no owner any more: no graph is left, and all of it is free."""
        self.graphs.clear()
        self.warm.clear()
        free_scratch(*self.scratch)
        cuda.current_context().memory_manager.deallocations.clear()  # numba lets up to a fifth of the card's memory wait
