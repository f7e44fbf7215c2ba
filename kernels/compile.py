"""Compile kernels with no GPU: `python -m kernels.compile` takes every version of every op to PTX.

With LLM_NUMBA_TARGET=compile a launch does not run its kernel: it compiles it for the types of its arguments, for each
compute capability that was asked for. So type errors that plain Python forgives show on any machine.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data.files import Arguments, DataError, run_script

CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0)]


@dataclass
class Compiled:
    """What became of one version of an op at one compute capability."""

    op: str
    version: int
    cc: tuple[int, int]
    kernel: str = ""
    ptx: str = ""
    error: str = ""


_current: list[dict] = []  # (compute capability, NVVM's -opt) -> (kernel name, PTX)s of the launcher that is being run


def replace_launches() -> None:
    """From now on `kernel[grid, block, ...](*args)` compiles."""
    from types import SimpleNamespace

    from numba.cuda import dispatcher
    from numba.cuda.dispatcher import CUDADispatcher

    # device functions ask the current card for its compute capability
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
    CUDADispatcher.__getitem__ = lambda dispatcher, config: lambda *args: _compile(dispatcher, args)
    _remember_the_types_of_calls()


def _remember_the_types_of_calls() -> None:
    """Numba looks up anew what each `+` of a kernel gives, through all the functions that a `+` may mean: a third of its
    front end's time, were it not remembered here."""
    from numba.cuda.core.targetconfig import ConfigStack
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.types import Function

    look_up, known = Function.get_call_type, {}

    def get_call_type(function, context, args, kws):
        if context is not cuda_target.typing_context:  # the CPU's compiler asks here too
            return look_up(function, context, args, kws)
        flags = ConfigStack.top_or_none()  # fastmath and the like: what a call compiles may depend on them
        key = function, tuple(args), tuple(kws.items()), flags and flags.summary()
        if key not in known:
            known[key] = look_up(function, context, args, kws)
        return known[key]

    Function.get_call_type = get_call_type


def _compile(dispatcher, args) -> None:
    signature = tuple(dispatcher.typeof_pyval(arg) for arg in args)
    texts = _ptx(dispatcher, signature, tuple(_current[-1]))
    for found, ptx in zip(_current[-1].values(), texts, strict=True):
        found.append((dispatcher.py_func.__name__, ptx))


@functools.cache  # versions share kernels
def _ptx(dispatcher, signature: tuple, targets: tuple) -> list[str]:
    """One pass of numba's front end, then NVVM once for each target."""
    from numba.cuda.compiler import _compile_pyfunc_with_fixup
    from numba.cuda.cudadrv.nvrtc import get_arch_option
    from numba.cuda.cudadrv.nvvm import compile_ir

    options = dispatcher.targetoptions
    fastmath = bool(options.get("fastmath", False))
    library, _ = _compile_pyfunc_with_fixup(
        dispatcher.py_func,
        signature,
        device=False,
        abi="numba",
        cc=(9, 0),
        fastmath=fastmath,
        launch_bounds=options.get("launch_bounds"),
    )
    modules = [_text(module) for module in dict.fromkeys(library.modules)]  # the kernel's, then its device functions'
    texts = []
    for cc, opt in targets:
        # numba compiles for the architecture-specific target (sm_90a) where the card has one; so do we
        arch = get_arch_option(*cc, "a" if cc >= (9, 0) else "")
        texts.append(compile_ir(modules, arch=arch, opt=opt, fastmath=fastmath).decode().strip("\0").strip())
    if any(".extern .func" in ptx for ptx in texts):  # numba would link a library then: such a kernel cannot be cached on disk
        raise TypeError(f"{dispatcher.py_func.__name__} calls a library's function (array.reshape in a kernel does)")
    return texts


_text = functools.cache(str)  # of an LLVM module: a device function's is printed once


def compile_launches(
    launch: Callable[[], object], capabilities=CAPABILITIES, optimize=CAPABILITIES
) -> dict[tuple, list[tuple[str, str]]]:
    """For each compute capability the (kernel, PTX) of everything that launch() launches. NVVM optimizes for those in
    `optimize`; for the others it translates what is there, which takes half the time and fails where it would. Called in
    a process whose target is `compile`."""
    _current.append({(cc, 3 if cc in optimize else 0): [] for cc in capabilities})
    try:
        launch()
        return {cc: found for (cc, _), found in _current[-1].items()}
    finally:
        _current.pop()


def compile_version(
    version, capabilities=CAPABILITIES, shape: dict | None = None, optimize=CAPABILITIES
) -> dict[tuple, list[tuple[str, str]]]:
    """The same of the version's launcher at this shape (the op's small one unless given), where it can run."""
    import numpy as np

    arguments = version.op.make_arguments(np.random.default_rng(0), **(shape or version.op.small))
    where = [cc for cc in capabilities if cc >= version.needs_cc]
    return compile_launches(lambda: version(*arguments.values()), where, optimize)


def compile_all(only: str = "", file: str | None = None) -> Iterator[Compiled]:
    """Every version of the ops whose name contains `only`, at every compute capability that it can run on, as they come. With a
    file, the version of the one op that stands there. Raises DataError where there is no such op, or nothing to compile with."""
    from cuda.pathfinder import DynamicLibNotFoundError

    from kernels.op import load_all

    ops = [op for op in load_all().values() if only in op.name]
    if not ops:
        raise DataError(f"no op's name contains {only}; there are {', '.join(sorted(load_all()))}")
    versions = [version for op in ops for version in op.versions.values() if not version.needs()]
    if file:
        from kernels.harness import YOURS, load_file

        named = [op for op in ops if op.name == only]
        if not named:
            raise DataError(f"--file {file}: which op's? One of {', '.join(op.name for op in ops)}")
        load_file(named[0], file)
        versions = [named[0].versions[YOURS]]
    for version in versions:
        name, number = version.op.name, version.number
        try:
            for cc, kernels in compile_version(version).items():
                yield from (Compiled(name, number, cc, kernel, ptx) for kernel, ptx in kernels)
        except DynamicLibNotFoundError as error:
            library = str(error).partition(":")[0]  # Failure finding "libnvrtc.so.13 or libnvrtc.so.12"
            raise DataError(f"CUDA's compiler is not installed ({library}): pip install -e '.[dev]'") from None
        except Exception as error:  # numba raises many kinds, and each is a finding of the report
            lines = [line for line in str(error).splitlines() if line.strip()]
            yield Compiled(name, number, version.needs_cc, error=f"{type(error).__name__}: " + "\n".join(lines))


def main() -> None:
    parser = Arguments(prog="python -m kernels.compile", description="Compiles every version of every op to PTX, with no GPU.")
    parser.add_argument("only", nargs="?", default="", metavar="NAME", help="only the ops whose name contains it")
    parser.add_argument("--file", help="a version of your own of the op NAME, as run.py --template writes it")
    asked = parser.parse_args()
    if os.environ.get("LLM_NUMBA_TARGET") != "compile":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "kernels.compile", *sys.argv[1:]],
            {**os.environ, "LLM_NUMBA_TARGET": "compile"},
        )
    failed = False
    for row in compile_all(asked.only, asked.file):
        result = row.error or f"{len(row.ptx)} bytes of PTX"
        print(f"{row.op} {asked.file or row.version} sm_{row.cc[0]}{row.cc[1]} {row.kernel}: {result}", flush=True)
        failed |= bool(row.error)
    sys.exit(failed)


if __name__ == "__main__":
    from kernels import compile as module  # the one that device.py knows; this is a second copy

    run_script(module.main)
