"""The trainer through its real command line: what it prints, what it writes, what it samples, and how it ends."""

import ctypes
import ctypes.util
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import train_gpt2_fp32
from data import pydoc_corpus
from data.checkpoint import GPT2Config, write_checkpoint
from data.corpus import token_files
from data.files import DataError, write_tokens
from data.tokenizer import decode
from kernels import cublas, op
from kernels.check import Problem, is_right, relative_error
from kernels.matmul import wgmma
from kernels.op import OPS, Picked, load_all
from kernels.pick import picks_for_this_card
from kernels.unfused import Unfused, fused_where_possible
from model import GPT2, random_parameters
from train_gpt2_fp32 import FLAGS, Xorshift, compile_sample_softmax, read_flags, show_products, train

ROOT = Path(__file__).parent.parent
WITH_CUBLAS = dict(os.environ)
CONFIG = GPT2Config(64, 50257, 50304, 1, 2, 16)  # GPT-2's vocabulary, as the text is real, and little else
COMMAND = [sys.executable, str(ROOT / "train_gpt2_fp32.py")]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The prefix of real text as tokens."""
    prefix = tmp_path_factory.mktemp("corpus") / "topics"
    pydoc_corpus.prepare_topics(prefix)
    return str(prefix)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.bin"
    write_checkpoint(path, CONFIG, random_parameters(CONFIG, seed=3))
    model = GPT2.from_checkpoint(path, report=lambda line: None)  # so that what runs it compiles nothing, and says nothing
    model.train_step(*np.zeros((2, 4, 16), np.int32), 0.0, 1)
    return str(path)


@pytest.fixture
def tiny(corpus, checkpoint):
    """The flags of a run that takes a second."""
    return ["-i", corpus, "-e", checkpoint, "-b", "4", "-t", "16", "--device", "cpu"]


def run(*flags, **options):
    return subprocess.run([*COMMAND, *map(str, flags)], capture_output=True, text=True, timeout=280, **options)


def losses(lines: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .*: train loss (\S+)", lines, re.M)]


def assert_logged(lines, kind, steps, printed):
    """The log has four digits of a loss that was printed with six, so each line is the rounding of a number that prints so."""
    for line, step, loss in zip(lines, steps, printed, strict=True):
        assert line.rstrip("\n") in {f"s:{step} {kind}:{near:.4f}" for near in (loss - 5e-7, loss, loss + 5e-7)}


def test_a_d2_model_learns_real_text(corpus, tmp_path):
    log = tmp_path / "d2.log"
    flags = ["-b", 4, "-t", 32, "-x", 20, "-l", 2e-3, "-v", 20, "-m", 4, "-g", 8, "-o", log]
    done = run("-i", corpus, "-e", "d2", "--device", "cpu", *flags)
    assert done.returncode == 0, done.stderr
    train = losses(done.stdout)
    assert len(train) == 20
    assert np.mean(train[-3:]) < 8.5
    first, last = (float(loss) for loss in re.findall(r"^val loss (\S+)", done.stdout, re.M))
    assert abs(first - np.log(50257)) < 0.2  # a fresh model holds every token for about as likely
    assert last < first - 2
    written = log.read_text().splitlines()
    assert_logged(written[1:-1], "trl", range(20), train)
    assert_logged([written[0], written[-1]], "tel", [0, 20], [first, last])


def test_what_it_prints_has_llmcs_form(tiny, corpus, checkpoint, tmp_path):
    log = tmp_path / "run.log"
    flags = ["-x", 2, "-v", 1, "-m", 3, "-s", 2, "-g", 5, "-l", 0.001, "-o", log]
    done = run(*tiny, *flags, env={**os.environ, "NUMBA_NUM_THREADS": "2"})
    rule = "+-----------------------+----------------------------------------------------+"
    num_parameters = 50304 * 16 + 64 * 16 + 4 * 16 + 3 * 16 * (16 + 1) + 16 * (16 + 1) + 8 * 16 * 16 + 5 * 16 + 2 * 16
    table = [
        [("Parameter", "Value")],
        [
            ("input dataset prefix", corpus),
            ("output log file", log),
            ("batch size B", 4),
            ("sequence length T", 16),
            ("learning rate", "0.001000"),
            ("val_loss_every", 1),
            ("val_max_batches", 3),
            ("sample_every", 2),
            ("genT", 5),
        ],
        [("device", "CPU, 2 threads"), ("TF32", "disabled")],
        [
            ("max_sequence_length T", 64),
            ("vocab_size V", 50257),
            ("padded_vocab_size Vp", 50304),
            ("num_layers L", 1),
            ("num_heads NH", 2),
            ("channels C", 16),
            ("num_parameters", num_parameters),
            ("weights", checkpoint),
        ],
        [
            ("train_num_batches", (Path(f"{corpus}_train.bin").stat().st_size - 1024) // 2 // 64),
            ("val_num_batches", 3),
            ("stops after", "2 steps (-x)"),
        ],
    ]
    expected = [rule]
    for rows in table:
        expected += [f"| {name:<21} | {value!s:<50} |" for name, value in rows] + [rule]
    printed = done.stdout.splitlines()
    assert printed[: len(expected)] == expected

    number = r"\d+\.\d{6}"
    lines = [
        r"allocated 3 MiB for model parameters",
        r"allocated \d+ MiB for activations",
        rf"val loss {number}",
        r"allocated 3 MiB for parameter gradients",
        r"allocated 0 MiB for activation gradients",
        r"allocated 3 MiB for AdamW optimizer state m",
        r"allocated 3 MiB for AdamW optimizer state v",
        rf"step    1/2: train loss {number} \({number} ms, \d+ tok/s\)",
        rf"val loss {number}",
        rf"step    2/2: train loss {number} \({number} ms, \d+ tok/s\)",
        rf"val loss {number}",
        r"generating:\n---\n(?s:.*?)\n---",
        rf"total average iteration time: {number} ms",
    ]
    assert re.fullmatch("\n".join(lines) + "\n", "\n".join(printed[len(expected) :]) + "\n"), done.stdout
    assert done.stderr == ""


def test_on_the_cpu_the_table_says_what_is_less_there(corpus, checkpoint):
    training = subprocess.Popen(
        [*COMMAND, "-i", corpus, "-e", checkpoint, "--device", "cpu"], stdout=subprocess.PIPE, text=True
    )
    lines = []
    for line in training.stdout:
        lines.append(line)
        if line.startswith("allocated"):
            break
    training.kill()
    training.communicate()
    table = "".join(lines)
    assert f"| sequence length T     | {64:<50} |" in table
    assert f"| output log file       | {'NULL':<50} |" in table
    assert f"| on the CPU            | {'T = 64 (see -t), stops after 40 steps (see -x)':<50} |" in table


def test_the_first_line_is_there_within_two_seconds(tiny):
    start = time.monotonic()
    with subprocess.Popen([*COMMAND, *tiny, "-x", "1"], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout.readline().startswith("+---")
        seconds = time.monotonic() - start
        training.kill()
    assert seconds < 2


def test_a_terminal_is_told_what_compiles_in_a_line_that_goes_away(tmp_path):
    ours, theirs = pty.openpty()
    script = "from numba import njit; from kernels.progress import name_what_compiles; name_what_compiles()\n"
    script += "def twice(x): return 2 * x\nnjit(twice)(1)"
    subprocess.run([sys.executable, "-c", script], stderr=theirs, cwd=ROOT, check=True, timeout=120)
    assert os.read(ours, 1000) == b"\r\x1b[Kcompiling twice, 0 done (the first run only)\r\x1b[K"


def test_elsewhere_it_is_said_once_and_only_where_the_cache_lacks_it(tmp_path):
    script = "import numpy as np, cpu_reference; from kernels.progress import name_what_compiles; name_what_compiles()\n"
    script += "cpu_reference.residual_forward(*np.ones((3, 4))); cpu_reference.gelu_forward(*np.ones((2, 4)))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = {"args": [sys.executable, "-c", script], "cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    said = [subprocess.run(**command).stderr for _ in range(2)]
    assert said == ["compiling cpu_reference for this CPU: it is kept for the next run\n", ""]


def test_a_damaged_cache_is_named_as_what_to_delete_and_a_full_one_as_where_to_make_room(tmp_path):
    script = "import numpy as np, cpu_reference, resource, sys\nfrom kernels.harness import in_one_line\n"
    script += "if sys.argv[1:]: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"  # Python ignores the signal
    script += "try: cpu_reference.residual_forward(*np.ones((3, 4)))\nexcept Exception as error: print(in_one_line(error))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for kind, content in (("", b""), ("*.nbc", b""), ("*.nbi", b"x"), ("*.nbi", b"")):
        for file in tmp_path.rglob(kind) if kind else ():
            file.write_bytes(content)
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
        told = rf"{tmp_path} has a damaged file of compiled code \(.*\): delete the folder, the next run fills it anew\n"
        assert re.fullmatch(told if kind else "", done.stdout) and done.stderr == ""
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "full")
    done = subprocess.run([sys.executable, "-c", script, "full"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"{tmp_path}/full, where compiled code is kept: File too large: make room, or set")


def test_where_no_data_is_named_it_finds_some_and_says_which(checkpoint):
    done = run("-e", checkpoint, "-b", 2, "-t", 16, "-x", 1, "-v", 0, "-s", 0, "--device", "cpu", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    prefixes = r"data/tiny_shakespeare( \(downloaded now\))?|data/pydoc_topics \(tiny_shakespeare unreachable\)"
    assert re.search(rf"^\| input dataset prefix  \| ({prefixes}) +\|$", done.stdout, re.M)
    assert len(losses(done.stdout)) == 1


def test_two_runs_are_the_same(tiny):
    first, second = (run(*tiny, "-x", 3, "-v", 0, "-s", 3, "-g", 9).stdout for _ in range(2))
    times = re.compile(r"\(.* ms, .* tok/s\)|time: .* ms")
    assert times.sub("", first) == times.sub("", second)


def test_recomputed_gelu_is_the_same_and_takes_less_memory(tiny):
    runs = [run(*tiny, "-b", 8, "-t", 64, "-x", 3, "-v", 0, "-s", 0, "-r", r).stdout for r in (0, 1)]
    assert losses(runs[0]) == losses(runs[1])


def test_more_steps_than_an_epoch_begin_it_again(tmp_path, checkpoint):
    for path in token_files(tmp_path / "short"):
        write_tokens(path, np.arange(2 * 16 * 2 + 1))
    flags = ["-i", tmp_path / "short", "-e", checkpoint, "-b", 2, "-t", 16, "-l", 0, "-v", 0, "-s", 0, "--device", "cpu"]
    loss = losses(run(*flags, "-x", 5).stdout)
    assert loss[0] != loss[1]
    assert loss == [loss[0], loss[1]] * 2 + [loss[0]]  # at a learning rate of 0 a batch has one loss


# ---- sampling ----

libm = ctypes.CDLL(ctypes.util.find_library("m"))
libm.expf.restype, libm.expf.argtypes = ctypes.c_float, [ctypes.c_float]


def sample_as_c_does(logits, coin):
    """numpy's accumulate adds one after the other, in the type of its argument; expf is the C library's own."""
    exponentials = np.array([libm.expf(logit) for logit in logits.tolist()], np.float32)
    norm = np.add.accumulate(exponentials.astype(np.float64))[-1]
    above = np.float32(np.float64(np.float32(coin)) * norm) < np.add.accumulate(exponentials)
    return int(np.argmax(above)) if above.any() else len(logits) - 1


def coins_as_c_draws_them():
    state = ctypes.c_uint64(1337)
    while True:
        for shift in (-12, 25, -27):
            state.value ^= state.value >> -shift if shift < 0 else state.value << shift
        drawn = ctypes.c_uint32(ctypes.c_uint64(state.value * 0x2545F4914F6CDD1D).value >> 32).value
        yield ctypes.c_float((drawn >> 8) / 16777216).value


def test_coins_are_the_c_programs():
    rng, coins = Xorshift(1337), coins_as_c_draws_them()
    drawn = [rng.random_f32() for _ in range(10000)]
    assert drawn == [next(coins) for _ in range(10000)]
    assert 0 <= min(drawn) and max(drawn) < 1
    assert abs(np.mean(drawn) - 0.5) < 0.01


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_tokens_are_the_c_programs(spread):
    sample_softmax, rng = compile_sample_softmax(), np.random.default_rng(0)
    coins = coins_as_c_draws_them()
    for V in (1, 2, 1000, 50257):
        logits = (spread * rng.standard_normal(V)).astype(np.float32)
        for coin in [0.0, 1 - 2**-24, *(next(coins) for _ in range(5))]:
            assert sample_softmax(logits, coin) == sample_as_c_does(logits, coin)


def test_a_rounded_sum_that_stays_below_the_threshold_gives_the_last_token():
    sample_softmax = compile_sample_softmax()
    logits = np.full(1 << 25, 0, np.float32)  # a float32 that counts by one stops at 2**24
    assert sample_softmax(logits, 0.75) == len(logits) - 1
    assert sample_softmax(logits, 0.25) == 1 << 23


def test_the_text_it_writes_is_what_its_logits_and_coins_give(tiny, checkpoint):
    done = run(*tiny, "-l", 0, "-x", 4, "-v", 0, "-s", 2, "-g", 12)
    texts = re.findall(r"generating:\n---\n(.*?)\n---\n", done.stdout, re.S)
    model, coins = GPT2.from_checkpoint(checkpoint, "cpu", report=lambda line: None), coins_as_c_draws_them()
    assert len(texts) == 2  # after steps 2 and 4, the second with the coins that follow the first's
    for text in texts:
        tokens = [50256]
        for _ in range(11):
            tokens.append(sample_as_c_does(model.next_logits(np.array(tokens)), next(coins)))
        assert text == "".join(c for c in decode(tokens[1:]) if c.isprintable() or c.isspace())


# ---- bad input ----


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-z", "1"], "there is no flag -z"),
        (["b", "4"], "there is no flag b"),
        (["-b4"], "there is no flag -b4"),
        (["-x", "3", "--no-such-flag"], "there is no flag --no-such-flag"),
        (["-b"], "-b takes a value"),
        (["--verbose", "-t"], "-t takes a value"),
        (["-o", "", "-x", "1"], "-o takes a value"),
    ],
)
def test_a_wrong_flag_is_named_above_the_usage(flags, told):
    done = run(*flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {told}\nUsage:   python train_gpt2_fp32.py [options]\nExample: ")
    assert all(re.search(rf"^  {flag} ", done.stderr, re.M) for flag in FLAGS)


def test_help_is_the_usage(tiny):
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")


BAD = {
    "-b 0": "-b 0: it takes a whole number from 1 up",
    "-b -3": "-b -3: it takes a whole number from 1 up",
    "-b four": "-b four: it takes a whole number from 1 up",
    "-t 1.5": "-t 1.5: it takes a whole number from 1 up",
    "-x 0": "-x 0: it takes a whole number from 1 up",
    "-m 0": "-m 0: it takes a whole number from 1 up",
    "-g -1": "-g -1: it takes a whole number from 0 up",
    "-l nan": "-l nan: it takes a number from 0 up",
    "-l fast": "-l fast: it takes a number from 0 up",
    "-f 2": "-f 2: it takes 0 or 1",
    "--device gpu": "--device gpu: it is one of auto, cuda, cpu",
    "-t 65": "-t 65 is above the model's max_seq_len of 64: lower -t",
    "-g 65": "-g 65 is above the model's max_seq_len of 64: lower -g",
    "-i {tmp}/none": "{tmp}/none_train.bin is missing: ",
    "-i {tmp}/empty": "{tmp}/empty_train.bin is empty: ",
    "-i {tmp}/truncated": "{tmp}/truncated_train.bin is truncated, ",
    "-i {tmp}/magic": "{tmp}/magic_train.bin is not a token file ",
    "-i {tmp}/short": "{tmp}/short_train.bin has 64 tokens, a batch needs B*T+1 = 65: lower -b or -t",
    "-i {tmp}/foreign": "{tmp}/foreign_train.bin: token 60000 at position 7 is outside the model's vocabulary of 50,257: ",
    "-e {tmp}/none.bin": "{tmp}/none.bin is missing: ",
    "-e d3": "-e d3: there is no such file, and the sizes are d2, d4, d6, d12, d24, d36, d48",
    "-e {tmp}/magic_train.bin": "{tmp}/magic_train.bin is not a checkpoint ",
    "-e {tmp}/cut.bin": "{tmp}/cut.bin is truncated, ",
    "-o {tmp}/no/folder/log": "-o {tmp}/no/folder/log: it cannot be written (No such file or directory): name another file",
    "-o /dev/full": "-o /dev/full: it cannot be written (No space left on device): name another file",
    "--kernel layernorm_forward=99": "--kernel layernorm_forward=99: layernorm_forward has the versions 1",
    "--kernel layernorm_forward": "--kernel layernorm_forward: layernorm_forward has the versions 1",
    "--kernel sorting=1": "--kernel sorting=1: no op is called sorting; there are adamw_update, ",
    "--kernel gelu_forward=1": "--kernel gelu_forward=1: kernels run on a GPU, on the CPU each layer has one version: leave it out",
    "--profile": "--profile times kernels on a GPU: leave it out on the CPU",
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("bad")
    for name in ("empty", "truncated", "magic", "short", "foreign"):
        for path in token_files(folder / name):
            tokens = np.arange(64 if name == "short" else 65)
            write_tokens(path, np.where(tokens == 7, 60000, tokens) if name == "foreign" else tokens)
            content = path.read_bytes()
            path.write_bytes({"empty": b"", "truncated": content[:-2], "magic": b"text" + content[4:]}.get(name, content))
    (folder / "cut.bin").write_bytes(Path(checkpoint).read_bytes()[:-4])
    return folder


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_that_says_what_to_do(flags, tiny, bad_files, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*COMMAND[1:], *tiny, "-x", "1", *flags.format(tmp=bad_files).split()])
    monkeypatch.setattr(train_gpt2_fp32, "heed_ctrl_c", lambda: None)  # pytest keeps its own
    with np.errstate(), pytest.raises(SystemExit) as end:
        train_gpt2_fp32.main()
    assert end.value.code.startswith("error: " + BAD[flags].format(tmp=bad_files))
    assert "\n" not in end.value.code


def test_bad_input_ends_the_command_with_1_and_that_line(tiny):
    done = run(*tiny, "-b", 0)
    assert (done.returncode, done.stderr) == (1, f"error: {BAD['-b 0']}\n")


@pytest.mark.parametrize("flags", ["-t 65", "-g 65", "-e d3", "--kernel gelu_forward=1", "--kernel gelu_forward=99", "--profile"])
def test_what_can_be_told_at_once_is_told_before_the_first_line(flags, tiny, capsys):
    with pytest.raises(DataError):
        train(read_flags([*tiny, *flags.split()]))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flag", ["--kernel", "--fused", "--graph", "--profile"])
def test_the_usage_says_what_needs_a_gpu(flag):
    assert FLAGS[flag].usage.endswith("needs a GPU)")


@pytest.mark.skipif("gpu" in os.environ["LLM_NUMBA_TARGET"], reason="there is a GPU")
def test_a_missing_gpu_is_said(tiny):
    done = run(*tiny, "--device", "cuda")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: --device cuda: no GPU that CUDA can use was found")


def test_a_loss_that_is_no_number_ends_the_run_in_one_line(tiny):
    done = run(*tiny, "-l", "1e30", "-v", 0, "-s", 0, "-x", 30)
    assert done.returncode == 1
    assert re.fullmatch(r"error: step \d+: no finite number since \w+.*: lower the learning rate \(-l\)\n", done.stderr)
    assert len(losses(done.stdout)) < 30


def test_weights_that_are_no_numbers_are_told_from_a_high_learning_rate(tiny, tmp_path):
    write_checkpoint(tmp_path / "nan.bin", CONFIG, np.full(CONFIG.num_parameters, np.nan, np.float32))
    done = run(*tiny, "-e", tmp_path / "nan.bin", "-v", 0, "-s", 0, "-x", 3)
    assert done.returncode == 1
    assert done.stderr == "error: step 1: no finite number since activation encoded: start from other weights (-e)\n"


def test_a_log_that_is_what_the_run_reads_is_refused_and_left_as_it_was(tiny, corpus, checkpoint):
    for path in (checkpoint, *token_files(corpus)):
        before = Path(path).read_bytes()
        with pytest.raises(DataError, match=f"^-o {path}: it is what this run reads: name another file$"):
            train(read_flags([*tiny, "-o", str(path)]))
        assert Path(path).read_bytes() == before


# ---- without cuBLAS ----


@pytest.fixture
def no_nvmath(tmp_path, monkeypatch):
    """nvmath-python fails to import, here and in subprocesses."""
    (tmp_path / "nvmath").mkdir()
    (tmp_path / "nvmath" / "__init__.py").write_text("raise ImportError('nvmath is hidden')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cublas, "TARGET", "gpu")  # nothing else is in cuBLAS's way
    for name in [name for name in sys.modules if name.split(".")[0] == "nvmath"]:
        monkeypatch.delitem(sys.modules, name)
    cublas.missing.cache_clear()
    yield
    cublas.missing.cache_clear()


def best_of_ours(name: str, *precisions: str) -> int:
    numbered = OPS[name].versions.items()
    return max(number for number, version in numbered if not version.chooses and version.precision in precisions)


def test_without_cublas_our_own_products_take_over_and_the_table_says_so(no_nvmath, capsys):
    picked = Picked({name: 0 for name, op in load_all().items() if 0 in op.versions})
    for name in picked.picks:
        assert picked.ladder(name)[0].number == best_of_ours(name, "fp32", "tf32")
    show_products(picked)
    printed = capsys.readouterr().out
    best = best_of_ours("matmul_forward", "tf32")
    assert printed.startswith(f"| matrix products       | version {best}: ")
    assert "\n| cuBLAS                | needs nvmath-python and cuBLAS: pip install" in printed


@pytest.mark.parametrize(("capability", "fused"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_without_cublas_a_card_that_has_no_fused_product_takes_the_simple_ops(no_nvmath, monkeypatch, capability, fused):
    monkeypatch.setattr(op, "compute_capability", lambda: capability)
    monkeypatch.setattr(wgmma, "compute_capability", lambda: capability)
    picked = Picked({})
    ops = fused_where_possible(picked)
    assert (ops is picked) == fused
    assert isinstance(fused_where_possible(picked, fused=False), Unfused)
    for name in ("matmul_forward", "matmul_backward_input", "matmul_backward_weight"):
        assert picked.ladder(name)


@pytest.mark.parametrize("name", ["matmul_forward", "matmul_backward_input", "matmul_backward_weight"])
def test_the_letter_f_decides_what_a_product_is_made_of(name):
    def precisions(tf32):
        return [version.precision for version in Picked(picks_for_this_card(tf32), tf32=tf32).ladder(name)]

    assert name in picks_for_this_card() and name not in picks_for_this_card(3)  # cuBLAS, which is picked, would come first
    assert not {"tf32", "3xtf32"} & set(precisions(0))
    assert precisions(1)[-1] == "3xtf32" and "tf32" in precisions(1)
    assert precisions(3)[0] == "3xtf32" and "tf32" not in precisions(3)
    assert Picked({name: 8}, tf32=3).ladder(name)[0].number == 8  # who asks for another gets it
    with pytest.raises(ValueError, match="0, 1 or 3, not 2"):
        Picked({}, tf32=2)


@pytest.mark.skipif("simulator" not in os.environ["LLM_NUMBA_TARGET"], reason="run with LLM_NUMBA_TARGET=simulator")
def test_without_cublas_the_products_are_right(no_nvmath):
    for name in ("matmul_forward", "matmul_backward_input", "matmul_backward_weight"):
        problem = Problem.of(OPS[name], OPS[name].small, seed=1)
        arguments = problem.on_device()
        took = getattr(Picked({name: 0}), name)(*arguments.values())
        results = OPS[name].results(arguments, OPS[name].small)
        errors = {output: relative_error(results[output], true) for output, true in problem.truth.items()}
        assert took.number and is_right(took, errors), f"version {took.number}: {errors}"


# ---- how it ends ----


def training_of(*flags):
    return subprocess.Popen(
        [*COMMAND, *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )


def read_until(training, start: str) -> str:
    lines = []
    for line in training.stdout:
        lines.append(line)
        if line.startswith(start):
            break
    return "".join(lines)


def test_ctrl_c_ends_it_in_one_line_and_loses_nothing(tiny, tmp_path):
    log = tmp_path / "run.log"
    training = training_of(*tiny, "-x", 100000, "-v", 0, "-s", 0, "-o", log)
    printed = read_until(training, "step    5/")
    training.send_signal(signal.SIGINT)
    rest, errors = training.communicate(timeout=30)
    assert (training.returncode, errors) == (130, "")
    assert rest.endswith("\nstopped by Ctrl-C\n")
    assert_whole(log, losses(printed + rest))


def assert_whole(log, printed: list[float]):
    """A line is written, then printed, so the log may be one ahead."""
    lines = log.read_text().splitlines(keepends=True)
    assert_logged(lines[: len(printed)], "trl", range(len(printed)), printed)
    assert all(re.fullmatch(r"s:\d+ trl:\d+\.\d{4}\n", line) for line in lines)


def test_ctrl_c_at_the_start_is_as_clean(tiny):
    training = training_of(*tiny)
    training.stdout.readline()
    training.send_signal(signal.SIGINT)
    rest, errors = training.communicate(timeout=30)
    assert (training.returncode, errors) == (130, "")
    assert rest.endswith("\nstopped by Ctrl-C\n")


def test_a_killed_run_leaves_whole_lines_and_the_data_as_it_was(tiny, corpus, tmp_path):
    log = tmp_path / "run.log"
    before = [path.read_bytes() for path in token_files(corpus)]
    training = training_of(*tiny, "-x", 100000, "-v", 0, "-s", 0, "-o", log)
    printed = read_until(training, "step    5/")
    training.kill()
    training.communicate()
    assert_whole(log, losses(printed))
    assert [path.read_bytes() for path in token_files(corpus)] == before


def test_a_reader_that_leaves_ends_it_quietly(tiny):
    training = training_of(*tiny, "-x", 100000, "-v", 0, "-s", 0)
    read_until(training, "step    1/")
    training.stdout.close()
    assert training.wait(timeout=60) == 1
    assert training.stderr.read() == ""


def test_it_trains_with_its_output_closed(tiny, tmp_path):
    flags = [*tiny, "-x", 1, "-v", 0, "-s", 0, "-o", tmp_path / "run.log"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *map(str, flags)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"s:0 trl:\d+\.\d{4}\n", (tmp_path / "run.log").read_text())


# ---- on the GPU ----


@pytest.mark.gpu
def test_on_the_gpu_it_learns_as_on_the_cpu(corpus):
    flags = ["-i", corpus, "-e", "d4", "-t", 64, "-x", 20, "-v", 20, "-m", 4, "-g", 8]
    more = ["--device", "cpu"], [], ["-f", 0], ["-f", 3]
    on_cpu, on_gpu, in_fp32, in_three = (losses(run(*flags, *words).stdout) for words in more)
    np.testing.assert_allclose(on_gpu[0], on_cpu[0], rtol=1e-3)
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-2)
    np.testing.assert_allclose(in_fp32, on_cpu, rtol=1e-3)
    np.testing.assert_allclose(in_three, on_cpu, rtol=1e-3)
    assert on_gpu[-1] < on_gpu[0] - 0.5


@pytest.mark.gpu
def test_graphs_change_nothing_and_fused_ops_little(corpus):
    flags = ["-i", corpus, "-e", "d2", "-t", 128, "-x", 10, "-v", 0, "-s", 10, "-g", 8]
    plain, uncaptured, unfused = (losses(run(*flags, *more).stdout) for more in ([], ["--graph", 0], ["--fused", 0]))
    assert len(plain) == 10
    assert plain == uncaptured
    np.testing.assert_allclose(unfused, plain, rtol=1e-3)


@pytest.mark.gpu
def test_without_cublas_it_learns_the_same(corpus, no_nvmath):
    flags = ["-i", corpus, "-e", "d2", "-t", 128, "-x", 10, "-v", 0, "-s", 0]
    without = run(*flags)
    assert without.returncode == 0, without.stderr
    assert "| cuBLAS                | needs nvmath-python and cuBLAS" in without.stdout
    np.testing.assert_allclose(losses(without.stdout), losses(run(*flags, env=WITH_CUBLAS).stdout), rtol=1e-3)


@pytest.mark.gpu
def test_a_profile_names_every_kernels_time(corpus):
    done = run("-i", corpus, "-e", "d2", "-t", 128, "-x", 2, "-v", 0, "-s", 0, "--profile")
    assert done.returncode == 0, done.stderr
    assert "adamw_update" in done.stdout
    assert "attention_backward" in done.stdout


@pytest.mark.gpu
def test_memory_that_is_not_there_is_said_with_the_flag_to_lower(corpus):
    done = run("-i", corpus, "-e", "d12", "-b", 4096, "-t", 1024, "-x", 1)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "lower -b" in done.stderr
