"""Where a training step's time goes: `python train_gpt2_fp32.py --profile`. Each op's time on the GPU, from CUDA events."""

from collections import defaultdict
from dataclasses import dataclass, field

from kernels.device import cuda, uint64
from kernels.op import OPS
from kernels.timing import hold_kernel
from kernels.unfused import Unfused

HOLD_NANOSECONDS = 100_000_000  # longer than Python needs to queue a step, so that no kernel waits for its launch


@dataclass
class Spent:
    """What one version of an op took in all its calls of a step."""

    calls: int = 0
    ms: float = 0.0
    nbytes: int = 0  # that had to cross the memory bus
    flops: int = 0
    events: list = field(default_factory=list)


def work(op, args: tuple) -> tuple[int, int]:
    """The bytes that must cross the memory bus, and the FLOPs, of a call: of an op that does not tell, each array once, and once
    more if it is changed in place."""
    given = dict(zip(op.arguments, args, strict=True))
    if op.sizes:
        sizes = op.sizes(given)
        return op.bytes_moved(**sizes), op.flops(**sizes) if op.flops else 0
    return sum((1 + (name in op.changed)) * getattr(arg, "nbytes", 0) for name, arg in given.items()), 0


class Profiled:
    """The picked versions (kernels.op.Picked), with events around every call."""

    def __init__(self, picked):
        self.picked, self.stream = picked, picked.stream
        self.spent: dict[tuple[str, int], Spent] = defaultdict(Spent)

    def hold(self) -> None:
        """Let the GPU wait until the host is far ahead."""
        hold_kernel[1, 1, self.stream](uint64(HOLD_NANOSECONDS))

    def __getattr__(self, name: str):
        launch = getattr(self.picked, name)

        def timed(*args):
            start, end = cuda.event(), cuda.event()
            start.record(self.stream)
            version = launch(*args)
            end.record(self.stream)
            spent = self.spent[name, version.number]
            spent.events.append((start, end))
            nbytes, flops = work(version.op, args)
            spent.nbytes += nbytes
            spent.flops += flops
            return version

        return timed

    def table(self) -> list[tuple[str, int, Spent]]:
        """(op, version, what it spent), the most first. Waits for the GPU."""
        self.stream.synchronize()
        for spent in self.spent.values():
            spent.calls = len(spent.events)
            spent.ms = sum(cuda.event_elapsed_time(start, end) for start, end in spent.events)
        return sorted(((*key, spent) for key, spent in self.spent.items()), key=lambda row: -row[2].ms)


def profile_step(model, inputs, targets, learning_rate: float, step: int) -> Profiled:
    """One training step, launched kernel by kernel. The model learns from it as from any other."""
    plain, graph = model.ops, model.backend.graph
    profiled = Profiled(model.backend.picked)
    model.ops = Unfused(profiled) if isinstance(plain, Unfused) else profiled
    model.backend.graph = False
    try:
        profiled.hold()
        with model.backend.in_order():
            model.train_step(inputs, targets, learning_rate, step)
        return profiled
    finally:
        model.ops, model.backend.graph = plain, graph


def print_profile(profiled: Profiled) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = profiled.table()
    whole = sum(spent.ms for _, _, spent in rows)
    table = Table(title=f"a training step's ops: {whole:.2f} ms on the GPU", title_justify="left")
    for name in ("op", "version", "calls", "ms", "%", "us a call", "GB/s", "TFLOP/s"):
        table.add_column(name, justify="left" if name == "op" else "right")
    for op, number, spent in rows:
        rate = spent.nbytes / spent.ms / 1e6 if spent.ms else 0
        tflops = f"{spent.flops / spent.ms / 1e9:.0f}" if spent.flops else ""
        what = f"{op} [dim]{OPS[op].versions[number].description}[/dim]"
        share, each = f"{100 * spent.ms / whole:.1f}", f"{1e3 * spent.ms / spent.calls:.1f}"
        table.add_row(what, str(number), str(spent.calls), f"{spent.ms:.3f}", share, each, f"{rate:.0f}", tflops)
    Console(highlight=False, width=140).print(table)
