"""Where compiled code is kept: an edit is never answered with the code of before."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels.target import TARGET

ROOT = Path(__file__).parent.parent
STORIES = sorted([*ROOT.glob("kernels/*/forward.py"), *ROOT.glob("kernels/*/backward.py")])  # the files that are not hashed


def kernels_of(tree: ast.Module) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if any("cuda.jit" in ast.unparse(one) for one in node.decorator_list)]


@pytest.mark.parametrize("file", STORIES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_kernel_takes_nothing_from_another_forward_or_backward(file):
    """Numba's cache would not see that it has changed there."""
    tree = ast.parse(file.read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    foreign = {name.name for node in imports if node.module.endswith((".forward", ".backward")) for name in node.names}
    for kernel in kernels_of(tree):
        used = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name)}
        assert not used & foreign, f"{kernel.name} takes {used & foreign}: put it into a file that kernels/target.py hashes"


def cache_folder(home: Path) -> Path:
    code = "from kernels.target import CACHE_FOLDER; print(CACHE_FOLDER)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "LLM_NUMBA_TARGET": "simulator"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def test_what_nobody_has_used_for_a_month_is_removed(tmp_path):
    folder = cache_folder(tmp_path)
    old, recent = folder.parent / "0123456789ab", folder.parent / "ba9876543210"
    for other, days in ((old, 31), (recent, 29)):
        (other / "layer").mkdir(parents=True)
        os.utime(other, (time.time() - days * 24 * 3600,) * 2)
    os.utime(folder, (0, 0))  # as old as can be, and used now
    assert cache_folder(tmp_path) == folder and folder.exists()
    assert recent.exists() and not old.exists()


@pytest.mark.skipif(TARGET == "gpu", reason="where there is no GPU")
@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("gpu", "error: LLM_NUMBA_TARGET=gpu: no GPU that CUDA can use was found: leave the variable out"),
        ("tpu", "error: LLM_NUMBA_TARGET=tpu: use gpu, simulator or compile"),
        ("compile", "error: LLM_NUMBA_TARGET=compile runs nothing: `python -m kernels.compile` compiles, or leave it out"),
    ],
)
def test_a_target_that_cannot_be_is_answered_in_one_line(target, told):
    environment = {**os.environ, "LLM_NUMBA_TARGET": target}
    words = [sys.executable, "kernels/gelu/run.py", "--version", "1"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told + "\n")
