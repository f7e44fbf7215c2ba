"""How fast is a version? Times that hold: a busy queue, a flushed L2, the median of many runs; and the card's own ceilings.

A launch from Python takes longer (tens of microseconds) than many a kernel. So the stream is first held by a kernel that
waits, while the host queues everything that is to be timed; the events then stand close around the kernels.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernels.check import Random
from kernels.device import (
    ceil_div,
    cuda,
    float32,
    globaltimer,
    load4,
    multiprocessors,
    scratch,
    store4,
    to_device,
    uint64,
)


@dataclass(frozen=True)
class Times:
    """Microseconds: the median of `repeats` runs, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median


@cuda.jit(cache=True)
def hold_kernel(nanoseconds):
    """Keeps the stream busy for so long."""
    start = globaltimer()
    while globaltimer() - start < nanoseconds:
        pass


@cuda.jit(cache=True)
def flush_kernel(trash, never):
    """Reads an array larger than L2, so that nothing of the last run is found there. Writing it would leave L2 full of lines
    that have yet to go to memory, and whatever is timed next would wait for them."""
    i, total = 4 * cuda.grid(1), float32(0)
    while i < trash.size:
        a, b, c, d = load4(trash, i)
        total += a + b + c + d
        i += 4 * cuda.gridsize(1)
    if never:
        trash[0] = total


def time_launches(launch: Callable[[], None], repeats: int = 30) -> Times:
    """The time on the GPU of whatever `launch` queues on the default stream. It is called twice more before, to warm up and to
    see what it costs: what takes long is repeated less often, five times at least."""
    launch()
    cuda.synchronize()
    began = time.perf_counter()
    launch()
    host_seconds = time.perf_counter() - began
    cuda.synchronize()
    repeats = max(5, min(repeats, int(0.3 / (time.perf_counter() - began))))
    l2_bytes = cuda.get_current_device().L2_CACHE_SIZE
    trash = scratch("flush", 2 * l2_bytes // 4)
    hold = uint64(int(2e9 * host_seconds) + 300_000)
    pairs = [(cuda.event(), cuda.event()) for _ in range(repeats)]
    for start, end in pairs:
        hold_kernel[1, 1](hold)
        flush_kernel[4 * multiprocessors(), 512](trash, False)
        start.record()
        launch()
        end.record()
    cuda.synchronize()
    times = sorted(1e3 * cuda.event_elapsed_time(start, end) for start, end in pairs)
    return Times(statistics.median(times), times[repeats // 10], times[-1 - repeats // 10], repeats)


def median_ms(step: Callable[[], object], steps: int) -> float:
    """Wall-clock milliseconds of a call that waits for the GPU, once it has warmed up."""
    times = []
    for i in range(steps + 5):
        began = time.perf_counter()
        step()
        if i >= 5:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


@cuda.jit(cache=True)
def copy_kernel(out, inp):
    i = 4 * cuda.grid(1)
    if i + 3 < inp.size:
        a, b, c, d = load4(inp, i)
        store4(out, i, a, b, c, d)


def measure_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes a second, read plus written, of the fastest copy between two large arrays: the driver's or a kernel's."""
    inp = to_device(Random(0).standard_normal(nbytes // 4, dtype=np.float32))
    out = cuda.device_array_like(inp)
    blocks = ceil_div(inp.size, 4 * 512)
    copies = [lambda: out.copy_to_device(inp), lambda: copy_kernel[blocks, 512](out, inp)]
    return 2 * nbytes / (1e-6 * min(time_launches(copy, 10).median for copy in copies))


@cuda.jit(cache=True, fastmath=True)
def fma_kernel(out, rounds):
    """Eight independent chains of fused multiply-adds a thread: nothing but arithmetic."""
    x = float32(cuda.threadIdx.x)
    a0, a1, a2, a3, a4, a5, a6, a7 = x, x, x, x, x, x, x, x
    for _ in range(rounds):
        for _ in range(16):
            a0 = a0 * x + float32(1)
            a1 = a1 * x + float32(2)
            a2 = a2 * x + float32(3)
            a3 = a3 * x + float32(4)
            a4 = a4 * x + float32(5)
            a5 = a5 * x + float32(6)
            a6 = a6 * x + float32(7)
            a7 = a7 * x + float32(8)
    out[cuda.grid(1)] = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7


def measure_fp32() -> float:
    """FLOPs a second of float32 multiply-adds that touch no memory."""
    blocks, threads, rounds = 8 * multiprocessors(), 256, 256
    out = cuda.device_array(blocks * threads, np.float32)
    times = time_launches(lambda: fma_kernel[blocks, threads](out, rounds), 10)
    return 2 * 8 * 16 * rounds * blocks * threads / (1e-6 * times.median)
