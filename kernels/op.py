"""The registry: one declaration of an op feeds run.py, the tests, the benchmark, the picker, the docs and model.py.

gelu_forward = Op(
    reference=cpu_reference.gelu_forward,               # what is right; its arguments are the op's, outputs first
    inputs=lambda rng, N: {"inp": rng.standard_normal(N, dtype=np.float32)},
    outputs=lambda N: {"out": N},                       # overwritten: poisoned with NaN before each check
    bytes_moved=lambda N: 8 * N,                        # at the very least: inp read once, out written once
    shape={"N": 25_165_824}, small={"N": 200}, odd=[{"N": 1}, {"N": 33}],
)

@gelu_forward.version(1, "a thread an element")
def gelu_forward1(out, inp, *, block_size=256, stream=0): ...
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kernels.device import ShapeError, compute_capability

OPS: dict[str, "Op"] = {}
FOLDER = Path(__file__).parent
PRECISIONS = {  # how many products of TF32 make one product -> the precisions that a version may then have
    0: ("fp32", "either"),
    1: ("fp32", "either", "tf32", "3xtf32"),
    3: ("fp32", "either", "3xtf32"),
}
PRECISION_NAMES = {"fp32": "", "tf32": "TF32", "3xtf32": "3 x TF32", "either": "fp32 or TF32"}


@dataclass(frozen=True)
class Version:
    """One rung of a ladder: a launcher and what is worth saying about it."""

    op: "Op"
    number: int
    description: str
    launcher: Callable
    precision: str = "fp32"  # "tf32"; "3xtf32", fp32's digits out of TF32; or "either": the launcher takes tf32=True or False
    repeatable: bool = True  # bit for bit, run after run; False where the order of atomics decides
    needs_cc: tuple[int, int] = (7, 5)  # the compute capability that its instructions need
    needs: Callable[[], str | None] = lambda: None  # a library that has to be there: a sentence where it is missing
    chooses: bool = False  # it is one of the other versions, by shape

    @property
    def tolerance(self) -> float:
        return max(self.op.tolerance, 2e-3) if self.precision in ("tf32", "either") else self.op.tolerance

    @property
    def file(self) -> Path:
        return Path(inspect.getsourcefile(self.launcher)).resolve()

    def options(self) -> set[str]:
        """The keyword-only arguments of the launcher: stream, and block_size where it can be chosen."""
        return {p.name for p in inspect.signature(self.launcher).parameters.values() if p.kind is p.KEYWORD_ONLY}

    def why_not(self) -> str | None:
        """Why this version cannot run here, in a sentence; None where it can."""
        if compute_capability() < self.needs_cc:
            return "needs compute capability {}.{}".format(*self.needs_cc)
        return self.needs()

    def __call__(self, *args, **options):
        return self.launcher(*args, **options)


@dataclass(eq=False)
class Op:
    """One pass of one layer."""

    reference: Callable
    inputs: Callable[..., dict]  # (rng, **shape) -> every argument that is not a pure output, by name
    outputs: Callable[..., dict]  # (**shape) -> the shapes of the overwritten outputs, by name
    bytes_moved: Callable[..., int]  # (**shape) -> the bytes that must cross the memory bus
    shape: dict  # what run.py times unless told otherwise, and the docs' tables
    small: dict  # what the simulator can do in a second
    flops: Callable[..., int] | None = None  # (**shape) -> where arithmetic, not bytes, sets the limit
    sizes: Callable[[dict], dict] | None = None  # arguments by name -> their shape, where bytes or FLOPs do not follow from arrays
    odd: list[dict] = field(default_factory=list)  # shapes at which every version is right, or refuses in a sentence
    trainer_shapes: list[dict] = field(default_factory=list)  # what the picker times; [shape] where left empty
    large: list[dict] = field(default_factory=list)  # a gigabyte and more: where the memory's speed alone shows
    changed: tuple[str, ...] = ()  # inputs that the op changes in place: compared as well
    compared: dict[str, Callable] = field(default_factory=dict)  # name -> function that keeps what is to be compared
    tolerance: float = 1e-5  # relative, in the 2-norm, against float64
    versions: dict[int, Version] = field(default_factory=dict)

    def __post_init__(self):
        self.name = self.reference.__name__
        self.arguments = list(inspect.signature(self.reference).parameters)
        module = inspect.currentframe().f_back.f_back.f_globals["__name__"]  # kernels.gelu.forward
        self.layer, self.pass_ = module.split(".")[-2:] if module.count(".") >= 2 else ("", "")
        OPS[self.name] = self

    def version(self, number: int, description: str, **facts) -> Callable:
        """Registers a launcher: its arguments are the op's, then keyword-only ones (stream, block_size, ...)."""

        def register(launcher: Callable) -> Callable:
            if number in self.versions:
                raise ValueError(
                    f"{self.name} has a version {number} already: {self.versions[number].launcher.__name__}"
                )
            self.versions[number] = Version(self, number, description, launcher, **facts)
            self.versions = dict(sorted(self.versions.items()))
            return launcher

        return register

    def make_arguments(self, rng, **shape) -> dict:
        """Fresh random inputs and poisoned outputs, as numpy arrays in the order of the signature."""
        values = self.inputs(rng, **shape)
        for name, size in self.outputs(**shape).items():
            values[name] = np.full(size, np.nan, np.float32)
        return {name: values[name] for name in self.arguments}

    def results(self, arguments: dict, shape: dict) -> dict:
        """Of a call's arguments, what the op has written, cut down to what is to be compared."""
        written = [*self.outputs(**shape), *self.changed]
        keep_all = lambda array: array  # noqa: E731
        return {name: self.compared.get(name, keep_all)(arguments[name]) for name in written}


def load_all() -> dict[str, Op]:
    """Imports every kernels/<layer>/<pass>.py; what they declare is in OPS."""
    for file in sorted(FOLDER.glob("*/*.py")):
        if file.stem not in ("__init__", "run"):
            importlib.import_module(f"kernels.{file.parent.name}.{file.stem}")
    return OPS


def of_layer(layer: str, pass_: str | None = None) -> list[Op]:
    """The ops that a layer's folder declares, forward before backward."""
    for file in sorted((FOLDER / layer).glob("*.py"), reverse=True):
        if file.stem not in ("__init__", "run"):
            importlib.import_module(f"kernels.{layer}.{file.stem}")
    return [op for op in OPS.values() if op.layer == layer and pass_ in (None, op.pass_)]


class Picked:
    """The picked version of every op as a namespace: `ops.gelu_forward(out, inp)`, like the module cpu_reference.

    picks: op name -> version number. Where a version refuses a shape or cannot run here, a library's takes its place, version
    0, and else the next one down the ladder. tf32: how many products of TF32 make one product: 0, 1, or 3 for fp32's digits;
    with 3 the versions that do so come before the library's.
    """

    def __init__(self, picks: dict[str, int], *, stream=0, tf32: int = 1, watch: Callable = lambda name: None):
        if tf32 not in PRECISIONS:
            raise ValueError(f"tf32 is how many products of TF32 make one: 0, 1 or 3, not {tf32}")
        self.picks, self.stream, self.tf32, self.watch = picks, stream, tf32, watch  # watch hears of each op's first call
        load_all()

    def called(self) -> set[str]:
        """The ops that have been called."""
        return vars(self).keys() & OPS.keys()

    def ladder(self, name: str) -> list[Version]:
        """The versions of an op in the order in which they are tried."""
        op = OPS[name]
        allowed = [v for v in op.versions.values() if v.precision in PRECISIONS[self.tf32] and not v.why_not()]
        first, three = self.picks.get(name), self.tf32 == 3  # else last: nobody who is content with one product takes three
        return sorted(allowed, key=lambda v: (v.number != first, (v.precision == "3xtf32") != three, v.number != 0, -v.number))

    def __getattr__(self, name: str) -> Callable:
        if name not in OPS:
            raise AttributeError(f"no op is called {name}; there are {', '.join(sorted(OPS))}")
        self.watch(name)
        ladder = [(v, {"tf32": self.tf32 == 1} if v.precision == "either" else {}) for v in self.ladder(name)]

        def launch(*args) -> Version:
            """Returns the version that took the call."""
            reason = "all were ruled out"
            for version, options in ladder:
                try:
                    version(*args, stream=self.stream, **options)
                    return version
                except ShapeError as refusal:
                    reason = f"the last one {refusal}"
            raise ShapeError(f"{name}: no version can run here: {reason}")

        launch.__name__ = name
        setattr(self, name, launch)
        return launch
