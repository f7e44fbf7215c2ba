"""Is a version right? Its outputs, poisoned with NaN before the call, against the reference in float64."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kernels.device import synchronize, to_device, to_host
from kernels.op import Op, Version


class Random(np.random.Generator):
    """numpy's generator, drawing large normal arrays on all cores: chunks with streams of their own, one result a seed."""

    CHUNK = 1 << 22

    def __init__(self, seed: int):
        self.seeds = np.random.SeedSequence(seed)
        super().__init__(np.random.PCG64(self.seeds))

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        if size is None or np.prod(size, dtype=np.int64) <= self.CHUNK:
            return super().standard_normal(size, dtype, out)
        array = np.empty(size, dtype)
        pieces = np.split(array.reshape(-1), range(self.CHUNK, array.size, self.CHUNK))
        with ThreadPoolExecutor() as pool:
            list(pool.map(_fill_normal, pieces, self.seeds.spawn(len(pieces))))
        return array


def _fill_normal(piece: np.ndarray, seed) -> None:
    np.random.Generator(np.random.PCG64(seed)).standard_normal(out=piece, dtype=piece.dtype)


@dataclass
class Problem:
    """One set of inputs of an op, on the host and on the device, and the true outputs."""

    op: Op
    shape: dict
    arguments: dict
    truth: dict

    @classmethod
    def of(cls, op: Op, shape: dict, seed: int = 0) -> "Problem":
        arguments = op.make_arguments(Random(seed), **shape)
        exact = {name: _as_float64(value) for name, value in arguments.items()}
        op.reference(*exact.values())
        return cls(op, shape, arguments, op.results(exact, shape))

    @classmethod
    def untrue(cls, op: Op, shape: dict, seed: int = 0) -> "Problem":
        """Inputs only, for timing what was checked at another shape."""
        return cls(op, shape, op.make_arguments(Random(seed), **shape), {})

    def on_device(self) -> dict:
        """Fresh device copies of every argument, the outputs poisoned."""
        return {name: to_device(a) if isinstance(a, np.ndarray) else a for name, a in self.arguments.items()}


def _as_float64(value):
    if not isinstance(value, np.ndarray):
        return value
    return value.astype(np.float64) if value.dtype == np.float32 else value.copy()


def relative_error(result: np.ndarray, truth: np.ndarray) -> float:
    """Norm of the difference over the norm of the truth; infinite where anything is not a finite number."""
    result = np.asarray(result, np.float64)
    if not np.isfinite(result).all():
        return np.inf
    norm = np.linalg.norm(truth)
    return float(np.linalg.norm(result - truth) / norm) if norm else float(np.linalg.norm(result))


def check(version: Version, problem: Problem, **options) -> dict[str, float]:
    """Runs the version once: the relative error of every output by name. Raises ShapeError where it refuses the shape."""
    arguments = problem.on_device()
    version(*arguments.values(), **options)
    synchronize()
    host = {name: to_host(a) if isinstance(problem.arguments[name], np.ndarray) else a for name, a in arguments.items()}
    results = problem.op.results(host, problem.shape)
    return {name: relative_error(results[name], true) for name, true in problem.truth.items()}


def is_right(version: Version, errors: dict[str, float], precision: str | None = None) -> bool:
    return all(error <= allowed(version, precision) for error in errors.values())


def allowed(version: Version, precision: str | None = None) -> float:
    """The largest relative error that is right. precision: what it was called to be, of a version that can be either."""
    return version.op.tolerance if precision == "fp32" else version.tolerance

