"""Measure a ladder: every version of an op checked, timed, and set against what the card can do. run.py prints it, the
picker chooses from it, the benchmark keeps it as JSON."""

import contextlib
import functools
import itertools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

from data.files import DataError, read_json, write_text
from kernels.check import Problem, check, is_right
from kernels.device import SIMULATE, TARGET, ShapeError, card_name, cuda, free_scratch, multiprocessors
from kernels.op import Op, Version
from kernels.target import CACHE_FOLDER
from kernels.timing import measure_bandwidth, measure_fp32, time_launches


@dataclass
class Kernel:
    """One kernel that a launcher launched, and what it takes of a multiprocessor."""

    name: str
    grid: tuple
    block: tuple
    registers: int
    shared: int  # bytes a block
    local: int  # bytes a thread: registers that did not fit
    occupancy: float  # resident threads over the most there could be


@dataclass
class Row:
    """What became of one version at one shape."""

    op: str
    version: int
    description: str
    shape: dict
    precision: str = "fp32"
    repeatable: bool = True
    block_size: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    right: bool | None = None
    refused: str = ""  # why it did not run, in its own sentence
    us: float | None = None
    us_low: float | None = None
    us_high: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    of_roofline: float | None = None  # the least time that bytes and FLOPs allow, over the time it took
    kernels: list[Kernel] = field(default_factory=list)


def measure(
    op: Op,
    shape: dict,
    versions: Iterable[Version] | None = None,
    *,
    block_sizes: Iterable[int | None] = (None,),
    timed: bool = True,
    checked: bool = True,
    tf32: bool = True,
    seed: int = 0,
    repeats: int = 30,
    keep_going: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Every version at this shape, with blocks of each of these sizes: on a GPU checked and timed, in the simulator checked.
    `progress` hears what is next. With keep_going a version that fails is a row that says so."""
    rows = []
    versions = list(versions or op.versions.values())
    progress(f"{op.name}: the reference in float64")
    problem = Problem.of(op, shape, seed) if checked else None
    for version, block_size in itertools.product(versions, block_sizes):
        row = Row(op.name, version.number, version.description, shape, version.precision, version.repeatable)
        rows.append(row)
        options = {"block_size": block_size} if block_size and "block_size" in version.options() else {}
        if version.precision == "either":
            options["tf32"] = tf32
            row.precision = "tf32" if tf32 else "fp32"
        row.block_size = options.get("block_size")
        row.refused = version.why_not() or ""
        if row.refused:
            continue
        blocks = f", blocks of {row.block_size} threads" if row.block_size else ""
        progress(f"{op.name} {version.number}{blocks}: {version.description}")
        try:
            if checked:
                row.errors = check(version, problem, **options)
                row.right = is_right(version, row.errors, row.precision)
            if timed and not SIMULATE:
                _time(version, problem or Problem.untrue(op, shape, seed), options, row, repeats)
        except ShapeError as refusal:
            row.refused = str(refusal)
        except Exception as error:
            if not keep_going:
                raise
            row.right, row.refused = False, f"failed: {type(error).__name__}: {error}"[:300]
        finally:
            free_scratch(None)  # what belongs to no model
    return rows


def _time(version: Version, problem: Problem, options: dict, row: Row, repeats: int) -> None:
    op, shape = version.op, problem.shape
    arguments = problem.on_device().values()

    def launch():
        version(*arguments, **options)

    with recorded_launches() as launches:
        launch()
    row.kernels = [_facts(*launched) for launched in launches]
    times = time_launches(launch, repeats)
    row.us, row.us_low, row.us_high = times.median, times.low, times.high
    row.gbps = op.bytes_moved(**shape) / times.median / 1e3
    seconds = op.bytes_moved(**shape) / roofline()["bandwidth"]
    if op.flops:
        row.tflops = op.flops(**shape) / times.median / 1e6
        peak = roofline()["tf32"] / 3 if row.precision == "3xtf32" else roofline()[row.precision]
        seconds = max(seconds, op.flops(**shape) / peak)
    row.of_roofline = 1e6 * seconds / times.median


class recorded_launches:
    """Inside this context every kernel launch is noted: (dispatcher, argument types, grid, block, shared bytes)."""

    def __enter__(self) -> list:
        from numba.cuda.dispatcher import _LaunchConfiguration

        self.kind, self.call = _LaunchConfiguration, _LaunchConfiguration.__call__
        noted: list = []

        def noting(config, *args):
            self.call(config, *args)
            types = tuple(config.dispatcher.typeof_pyval(arg) for arg in args)
            noted.append((config.dispatcher, types, config.griddim, config.blockdim, config.sharedmem))

        self.kind.__call__ = noting
        return noted

    def __exit__(self, *_):
        self.kind.__call__ = self.call


def _facts(dispatcher, types, grid, block, dynamic_shared) -> Kernel:
    compiled = dispatcher.overloads[types]
    threads = block[0] * block[1] * block[2]
    kernel = compiled.library.get_cufunc().kernel
    blocks = kernel.occupancy.max_active_blocks_per_multiprocessor(threads, dynamic_shared)
    most = cuda.get_current_device().MAX_THREADS_PER_MULTIPROCESSOR
    return Kernel(
        dispatcher.py_func.__name__, tuple(grid), tuple(block), compiled.regs_per_thread,
        compiled.shared_mem_per_block + dynamic_shared, compiled.local_mem_per_thread, blocks * threads / most,
    )  # fmt: skip


@functools.cache
def card() -> dict:
    """What a measurement was made with."""
    packages = {}
    for name in ("numba", "numba-cuda", "numpy", "cuda-core", "nvmath-python", "torch"):
        try:
            packages[name] = package_version(name)
        except PackageNotFoundError:
            packages[name] = None
    facts = {"card": card_name(), "python": platform.python_version(), "packages": packages}
    if TARGET == "gpu":
        facts |= {
            "driver": _driver(),
            "cuda": ".".join(str(part) for part in cuda.runtime.get_version()),
            "multiprocessors": multiprocessors(),
        }
    return facts


def _driver() -> str:
    """The driver's version as nvidia-smi tells it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


_roofline: dict = {}


def roofline() -> dict[str, float]:
    """This card's ceilings, measured: bytes a second of a large copy, FLOPs a second in fp32 and in TF32 (of cuBLAS where
    it is there). Kept on disk for the next run on the same card within the day."""
    if not _roofline:
        facts = card()
        file = CACHE_FOLDER / f"roofline-{facts['card'].replace(' ', '-')}.json"
        if file.exists() and time.time() - file.stat().st_mtime < 24 * 3600:
            with contextlib.suppress(DataError):  # one that is not whole is measured anew
                _roofline.update(read_json(file, "delete it"))
        if _roofline.keys() != {"bandwidth", "fp32", "tf32"}:
            _roofline.update(bandwidth=measure_bandwidth(), fp32=measure_fp32(), tf32=_measure_tf32())
            with contextlib.suppress(DataError):  # where it cannot be kept, the next run measures again
                write_text(file, json.dumps(_roofline))
    return _roofline


def _measure_tf32(n: int = 8192) -> float:
    from kernels.op import Picked

    best = Picked({}).ladder("matmul_forward")[0]
    arguments = Problem.untrue(best.op, {"N": n, "C": n, "OC": n}).on_device()
    options = {"tf32": True} if best.precision == "either" else {}
    return 2 * n**3 / (1e-6 * time_launches(lambda: best(*arguments.values(), **options), 10).median)


def write_json(file: str | Path, rows: list[Row], **more) -> None:
    """The rows with the card, driver and package versions that they were measured with."""
    facts = {**card(), **more}
    if TARGET == "gpu":
        facts["roofline"] = roofline()
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
