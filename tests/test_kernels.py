"""Every version of every op that the registry knows: right in the simulator, compiled with no GPU, right on the GPU.

The tests ask the registry, so a version is tested from the moment it exists.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda.pathfinder import DynamicLibNotFoundError

from data.files import DataError
from kernels import compile
from kernels.check import Problem, check, is_right
from kernels.compile import CAPABILITIES, compile_all, compile_version
from kernels.device import TARGET, ShapeError, free_scratch, scratch, scratch_of
from kernels.op import load_all

ROOT = Path(__file__).parent.parent
OPS = load_all()
VERSIONS = [version for op in OPS.values() for version in op.versions.values()]
NAMES = [f"{version.op.name}-{version.number}" for version in VERSIONS]

each_version = pytest.mark.parametrize("version", VERSIONS, ids=NAMES)


def cases(shapes_of, takes_block_size=False):
    """(version, shape) for each of an op's shapes, the versions of one shape side by side: they share its truth."""
    every = [(version, shape) for op in OPS.values() for shape in shapes_of(op) for version in op.versions.values()]
    every = [case for case in every if not takes_block_size or "block_size" in case[0].options()]
    names = [f"{v.op.name}-{v.number}-" + "x".join(str(size) for size in shape.values()) for v, shape in every]
    return pytest.mark.parametrize(("version", "shape"), every, ids=names)


@functools.lru_cache(maxsize=1)
def problem(name: str, shape: tuple) -> Problem:
    return Problem.of(OPS[name], dict(shape), seed=1)


def check_version(version, shape, may_refuse, **options):
    if reason := version.why_not():
        pytest.skip(f"{version.op.name} {version.number} {reason}")
    try:
        errors = check(version, problem(version.op.name, tuple(shape.items())), **options)
    except ShapeError as refusal:
        assert may_refuse, f"refuses the small shape: {refusal}"
        assert "need" in str(refusal), f"does not say what shape it needs: {refusal}"
        return
    assert is_right(version, errors), f"relative errors {errors}, at most {version.tolerance} is right"


@pytest.mark.skipif(TARGET != "simulator", reason="run with LLM_NUMBA_TARGET=simulator")
@cases(lambda op: [op.small])
def test_is_right_in_the_simulator(version, shape):
    check_version(version, shape, may_refuse=False)


@pytest.mark.skipif(TARGET != "simulator", reason="run with LLM_NUMBA_TARGET=simulator")
@cases(lambda op: op.odd)
def test_is_right_at_odd_shapes_in_the_simulator(version, shape):
    check_version(version, shape, may_refuse=True)


@pytest.mark.skipif(TARGET != "simulator", reason="run with LLM_NUMBA_TARGET=simulator")
@cases(lambda op: [op.small], takes_block_size=True)
def test_is_right_in_blocks_of_a_warp_and_a_half_or_says_what_it_needs(version, shape):
    check_version(version, shape, may_refuse=True, block_size=48)


@pytest.mark.gpu
@cases(lambda op: [op.small, op.shape])
def test_is_right_on_the_gpu(version, shape):
    check_version(version, shape, may_refuse=False)
    free_scratch()


@pytest.mark.gpu
@cases(lambda op: op.odd)
def test_is_right_at_odd_shapes_on_the_gpu(version, shape):
    check_version(version, shape, may_refuse=True)
    free_scratch()


def test_a_version_that_can_be_either_is_held_to_what_it_was_called_to_be():
    version = OPS["matmul_forward"].versions[0]
    assert is_right(version, {"out": 1e-3}, "tf32") and not is_right(version, {"out": 1e-3}, "fp32")


def test_scratch_is_its_owners_and_given_back_alone():
    mine, yours = object(), object()
    with scratch_of(mine):
        first = scratch("a test", 4)
        with scratch_of(yours):
            other = scratch("a test", 4)
        assert scratch("a test", 4) is first and other is not first
    free_scratch(yours)
    with scratch_of(mine):
        assert scratch("a test", 4) is first
    free_scratch(mine)
    with scratch_of(mine):
        assert scratch("a test", 4) is not first
    free_scratch(mine)


@pytest.mark.gpu
@each_version
def test_gives_the_same_bits_again_where_it_says_so(version):
    if reason := version.why_not() or (None if version.repeatable else "does not claim to be repeatable"):
        pytest.skip(f"{version.op.name} {version.number} {reason}")
    first, second = (run_small(version) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def run_small(version) -> dict:
    from kernels.device import cuda, to_host

    small = problem(version.op.name, tuple(version.op.small.items()))
    arguments = small.on_device()
    version(*arguments.values())
    cuda.synchronize()
    host = {name: to_host(a) if isinstance(small.arguments[name], np.ndarray) else a for name, a in arguments.items()}
    return small.op.results(host, small.shape)


# ---- compiled to PTX, with no GPU ----


def compile_one(name: str, number: int) -> dict:
    return compile_version(OPS[name].versions[number], optimize=())  # it is not to run, and what fails fails without


@each_version
def test_compiles_for_every_gpu_it_can_run_on(version, compiler):
    if version.needs():
        pytest.skip(f"{version.op.name} {version.number} launches no kernel of ours")
    compiled = compiler.submit(compile_one, version.op.name, version.number).result()
    assert list(compiled) == [cc for cc in CAPABILITIES if cc >= version.needs_cc]
    for (major, minor), kernels in compiled.items():
        assert kernels, "launches no kernel"
        for _, ptx in kernels:
            assert f".target sm_{major}{minor}" in ptx


def test_help_compiles_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compile", "--help"])
    with pytest.raises(SystemExit) as end:
        compile.main()
    assert end.value.code == 0 and "usage: python -m kernels.compile" in capsys.readouterr().out


def test_a_name_that_no_op_has_is_answered_with_those_there_are():
    with pytest.raises(DataError, match="^no op's name contains sorting; there are adamw_update, .*unpermute_forward$"):
        list(compile_all("sorting"))


def raising(error: Exception):
    def raise_it(version):
        raise error

    return raise_it


def test_without_a_compiler_it_stops_at_once_and_says_what_to_install(monkeypatch):
    missing = DynamicLibNotFoundError('Failure finding "libnvrtc.so.13": No such file\n')
    monkeypatch.setattr(compile, "compile_version", raising(missing))
    with pytest.raises(DataError) as told:
        list(compile_all("gelu"))
    assert str(told.value) == "CUDA's compiler is not installed (Failure finding \"libnvrtc.so.13\"): pip install -e '.[dev]'"


def test_a_version_that_does_not_compile_is_a_row_without_empty_lines(monkeypatch):
    monkeypatch.setattr(compile, "compile_version", raising(TypeError("no\n\nline 3\n")))
    row, *_ = compile_all("gelu_forward")
    assert (row.op, row.version, row.error) == ("gelu_forward", 1, "TypeError: no\nline 3")


@pytest.mark.parametrize(("expression", "code", "told"), [("inp[i]", 0, "bytes of PTX"), ("np.dot(inp, inp)", 1, "TypingError")])
def test_a_kernel_of_ones_own_that_the_simulator_can_run_and_numba_cannot_compile_is_told(tmp_path, expression, code, told):
    file = tmp_path / "my_kernel.py"
    file.write_text(f"""
import numpy as np
from kernels.device import ceil_div, cuda

@cuda.jit
def kernel(out, inp):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = {expression}

def gelu_forward(out, inp, *, stream=0):
    kernel[ceil_div(out.size, 128), 128, stream](out, inp)
""")
    command = [sys.executable, "-m", "kernels.compile", "gelu_forward", "--file", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "LLM_NUMBA_TARGET": "compile"})
    assert done.returncode == code and told in done.stdout, done.stdout + done.stderr
