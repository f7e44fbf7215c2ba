"""Everything that the project says about speed, measured on one card: `python kernels/bench.py` (or `make bench`).

    --ops [NAME ...]   every version of every op (or of those whose names contain NAME), checked and timed; what can do both
                       with TF32 and without is timed both ways
    --steps            the training step of GPT-2 124M: ours, and PyTorch's eager and compiled where torch is installed
    --losses           the loss of 74 steps on tiny Shakespeare beside PyTorch's, from the same weights and batches
    --trainer          batch sizes, the host's share of a step, how long a start takes, an epoch run twice
    --cpu              no GPU: the step on this machine's processor, ours and PyTorch's by turns

Without a flag: all but the last. What was measured is merged into doc/benchmarks/<card>.json (CPU.json), from which
doc/fill_tables.py makes the tables and the plots. torch is used here and in tests alone.
"""

import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # a script's own folder is there: the repo's root should be
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all else is imported: no traceback

import numpy as np

from data import corpus
from data.files import Arguments, DataError, read_json, replacing, run_script
from data.loader import DataLoader
from kernels.device import TARGET, cuda
from kernels.ladder import card, measure, roofline
from kernels.op import PRECISION_NAMES, load_all
from kernels.pick import keep_pick, pick_from
from kernels.profile import profile_step
from kernels.timing import median_ms
from model import GPT2, Tensors, config_of_size, parameter_shapes, random_parameters

FOLDER = Path(__file__).parent.parent / "doc" / "benchmarks"
B, T = 4, 1024
SLOW = 3.0  # versions that much slower than the best of their precision at an op's first shape are not timed at its others


def measure_ops(names: list[str], results: dict, checked: bool = True) -> None:
    """Every version at the op's shape; those that are not slow there at the trainer's shapes and at large ones too. What is
    best at the trainer's is picked; of the products, what is best in a step."""
    for op in load_all().values():
        if names and not any(name in op.name for name in names):
            continue
        trainer_shapes = op.trainer_shapes or [op.shape]
        versions, for_trainer = list(op.versions.values()), []
        for shape in [op.shape] + [shape for shape in [*trainer_shapes, *op.large] if shape != op.shape]:
            options = {"checked": checked and shape not in op.large, "keep_going": True}
            rows = measure(op, shape, versions, **options)
            either = [version for version in versions if version.precision == "either"]  # `rows` has them in TF32
            in_fp32 = measure(op, shape, either, tf32=False, **options) if either else []
            for row in rows + in_fp32:
                print(f"{row.op:28} {row.version:3} {row.precision} {_sizes(shape):40} ", _short(row), flush=True)
            if shape in trainer_shapes:
                for_trainer += rows
            if shape == op.shape:
                versions = _not_slow(op, rows)
            for name, new in (("rows", rows), ("rows in fp32", in_fp32)):
                keep = [old for old in results.get(name, []) if (old["op"], old["shape"]) != (op.name, shape)]
                results[name] = keep + [{**asdict(row), "commit": commit()} for row in new]
            save(results)
        number = pick_from(op, for_trainer, in_step=op.flops is not None)
        if number is not None:
            keep_pick(op.name, number)


def _not_slow(op, rows: list) -> list:
    timed = [row for row in rows if row.us]
    best = {row.precision: min(other.us for other in timed if other.precision == row.precision) for row in timed}
    return [op.versions[row.version] for row in timed if row.us <= SLOW * best[row.precision]]


def _sizes(shape: dict) -> str:
    return " ".join(f"{name}={size}" for name, size in shape.items())


def _short(row) -> str:
    if row.refused:
        return f"refused: {row.refused}"
    error = max(row.errors.values(), default=0.0)
    flag = "" if row.right or row.right is None else "  WRONG"
    rate = f"{row.tflops:7.1f} TFLOP/s" if row.tflops else f"{row.gbps:7.0f} GB/s"
    kernels = " ".join(f"{k.registers}r{f'+{k.local}L' if k.local else ''}/{k.occupancy:.0%}" for k in row.kernels)
    return f"{row.us:9.1f} us {rate} {row.of_roofline:5.0%}  error {error:.1e}{flag}  {kernels}"


# ---- the training step ----


STEPS = {
    "llm.numba": {},
    "llm.numba, three products of TF32 for one (-f 3)": {"tf32": 3},
    "llm.numba, no TF32 (-f 0)": {"tf32": 0},
}
TORCH_STEPS = {
    "PyTorch eager": {},
    "PyTorch torch.compile": {"compiled": True},
    "PyTorch torch.compile, no TF32": {"compiled": True, "tf32": False},
}
WITHOUT = {  # what each idea brings: the step without it
    "as it is": {},
    "nothing aside": {"overlap": False},
    "weight gradients without a transpose": {"kernels": {"matmul_backward_weight": 0}},
    "nothing aside, and weight gradients without a transpose": {"overlap": False, "kernels": {"matmul_backward_weight": 0}},
    "GELU in kernels of its own": {"kernels": {"matmul_gelu_forward": 1, "matmul_gelu_backward_input": 1}},
    "GELU in cuBLASLt's epilogues": {"kernels": {"matmul_gelu_forward": 0, "matmul_gelu_backward_input": 0}},
    "cuBLASLt alone where it shares the products with version 13": {
        "kernels": {"matmul_forward": 0, "matmul_backward_weight": 2}
    },
    "the inputs' gradients by version 13": {"kernels": {"matmul_backward_input": 13}},
    "attention without wgmma": {"kernels": {"attention_forward": 7, "attention_backward": 7}},
    "fused ops replaced (--fused 0)": {"fused": False},
    "no graphs (--graph 0)": {"graph": False},
}


def measure_steps(prefix: str, results: dict, steps: int = 40) -> None:
    """Wall-clock milliseconds a step, the loss read back at each, as the trainer prints them: the median after warm-up."""
    found, without = results.setdefault("steps", {}), results.setdefault("without", {})
    for table, measured in ((STEPS, found), (WITHOUT, without)):
        for name, options in table.items():
            model = GPT2.random("d12", "cuda", report=lambda line: None, **options)
            loader, numbers = DataLoader(f"{prefix}_train.bin", B, T), itertools.count(1)
            measured[name] = median_ms(lambda: model.train_step(*loader.next_batch(), 3e-4, next(numbers)), steps)  # noqa: B023
            print(f"{name}: {measured[name]:.2f} ms", flush=True)
            if name == "llm.numba":
                profiled = profile_step(model, *loader.next_batch(), 3e-4, next(numbers))
                results["profile"] = [
                    {"op": op, "version": version, **{k: getattr(spent, k) for k in ("calls", "ms", "nbytes", "flops")}}
                    for op, version, spent in profiled.table()
                ]
            model.close()
            save(results)
    without["commit"] = commit()
    try:
        import torch
    except ImportError:
        print("torch is not installed: PyTorch's step was not measured")
        return
    for name, options in TORCH_STEPS.items():
        step = TorchStep(random_parameters_of("d12"), **options)
        loader = DataLoader(f"{prefix}_train.bin", B, T)
        found[name] = median_ms(lambda: step(*loader.next_batch()), steps)  # noqa: B023
        print(f"{name} {torch.__version__}: {found[name]:.2f} ms", flush=True)
        save(results)


def random_parameters_of(size: str):
    config = config_of_size(size)
    return config, random_parameters(config, 1337)


class TorchStep:
    """PyTorch's training step on the same model: flash SDPA, TF32 products, padded vocabulary, fused AdamW."""

    def __init__(self, weights, compiled: bool = False, tf32: bool = True, device: str = "cuda"):
        import torch
        import torch.nn.functional as F

        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        config, flat = weights
        tensors = Tensors(flat, parameter_shapes(config))
        self.p = {
            name: torch.tensor(getattr(tensors, name), device=device, requires_grad=True) for name in tensors.shapes
        }
        self.optimizer = torch.optim.AdamW(self.p.values(), lr=3e-4, weight_decay=0.0, fused=True)
        L, NH, C, V = config.num_layers, config.num_heads, config.channels, config.vocab_size
        p = self.p

        def loss(x, y):
            b, t = x.shape
            h = p["wte"][x] + p["wpe"][:t]
            for l in range(L):
                n = F.layer_norm(h, (C,), p["ln1w"][l], p["ln1b"][l])
                q, k, v = (n @ p["qkvw"][l].T + p["qkvb"][l]).view(b, t, 3, NH, C // NH).permute(2, 0, 3, 1, 4)
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, C)
                h = h + a @ p["attprojw"][l].T + p["attprojb"][l]
                n = F.layer_norm(h, (C,), p["ln2w"][l], p["ln2b"][l])
                h = (
                    h
                    + F.gelu(n @ p["fcw"][l].T + p["fcb"][l], approximate="tanh") @ p["fcprojw"][l].T
                    + p["fcprojb"][l]
                )
            logits = F.layer_norm(h, (C,), p["lnfw"], p["lnfb"]) @ p["wte"].T
            return F.cross_entropy(logits.view(b * t, -1)[:, :V], y.view(-1))

        self.loss = torch.compile(loss) if compiled else loss
        self.torch, self.device = torch, device

    def __call__(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        x, y = (self.torch.tensor(tokens, dtype=self.torch.int64).to(self.device) for tokens in (inputs, targets))
        loss = self.loss(x, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def compare_losses(prefix: str, results: dict, steps: int = 74) -> None:
    """The same weights and batches through PyTorch and through us: the worst relative difference of a step's loss."""
    found = results.setdefault("losses", {})
    for tf32, name in {1: "TF32", 3: PRECISION_NAMES["3xtf32"], 0: "fp32"}.items():
        torch_step = TorchStep(random_parameters_of("d12"), tf32=tf32 == 1)
        model = GPT2.random("d12", "cuda", report=lambda line: None, tf32=tf32)
        loader = DataLoader(f"{prefix}_train.bin", B, T)
        theirs, ours = [], []
        for step in range(1, steps + 1):
            batch = loader.next_batch()
            theirs.append(torch_step(*batch))
            ours.append(model.train_step(*batch, 3e-4, step))
        worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
        found[name] = {"ours": ours, "theirs": theirs, "worst": worst, "commit": commit()}
        print(f"{name}: the losses of {steps} steps differ by at most {worst:.2e}; the last: {ours[-1]:.4f}, {theirs[-1]:.4f}")
        model.close()
        save(results)


# ---- the trainer as a user meets it ----


def measure_trainer(prefix: str, results: dict) -> None:
    found = results["trainer"] = {"batches": [], "starts": {}, "commit": commit()}
    for batch, recompute in [(1, False), (4, False), (4, True), (8, False), (16, False), (32, False), (64, False), (64, True)]:
        found["batches"].append(row := _measure_batch(prefix, batch, recompute))
        print(row, flush=True)
        save(results)
    found["host ms"] = _host_ms(prefix)
    print(f"host: {found['host ms']:.3f} ms a step", flush=True)
    epochs = []
    with tempfile.TemporaryDirectory() as empty:
        for name, cache in {"cold": {"XDG_CACHE_HOME": empty}, "warm": {"XDG_CACHE_HOME": empty}}.items():
            seconds, lines = _run_trainer(["-i", prefix, "-e", "d12", "-v", "0", "-s", "0"], cache)
            found["starts"][name] = seconds
            epochs.append([re.sub(r" \(.*", "", line) for line in lines if line.startswith("step")])
            print(f"{name} start: {seconds:.1f} s to the end of the first step", flush=True)
    found["same epoch"] = epochs[0] == epochs[1]
    found["steps of an epoch"] = len(epochs[0])
    print(f"two epochs of {len(epochs[0])} steps are the same to the last digit: {found['same epoch']}", flush=True)
    save(results)


def _measure_batch(prefix: str, batch: int, recompute: bool, steps: int = 8) -> dict:
    sizes = {}

    def report(line: str) -> None:
        _, mib, _, _, *what = line.split()
        sizes[" ".join(what)] = int(mib)

    model = GPT2.random("d12", "cuda", report=report, recompute=recompute)
    loader, numbers = DataLoader(f"{prefix}_train.bin", batch, T), itertools.count(1)
    if loader.num_batches < steps + 5:
        batches = itertools.repeat(loader.next_batch())
    else:
        batches = iter(loader.next_batch, None)
    ms = median_ms(lambda: model.train_step(*next(batches), 3e-4, next(numbers)), steps)
    model.close()
    mib = sizes["activations"], sum(sizes.values())
    return {"B": batch, "recompute": recompute, "ms": ms, "activations MiB": mib[0], "all MiB": mib[1]}


def _host_ms(prefix: str, steps: int = 40) -> float:
    """What a step takes beyond its graph: the time of one step, less what a second launch of its graph adds to that."""
    model = GPT2.random("d12", "cuda", report=lambda line: None)
    loader, numbers = DataLoader(f"{prefix}_train.bin", B, T), itertools.count(1)

    def step():
        model.train_step(*loader.next_batch(), 3e-4, next(numbers))

    def step_and_graph():
        graph.launch(stream)
        step()

    median_ms(step, 1)
    (graph,), stream = model.backend.graphs.values(), model.backend.core_streams[0]
    pairs = [(median_ms(step, 1), median_ms(step_and_graph, 1)) for _ in range(steps // 5)]  # by turns: the clock changes
    model.close()
    one, two = (statistics.median(times) for times in zip(*pairs, strict=True))
    return 2 * one - two


def _run_trainer(flags: list[str], environment: dict[str, str]) -> tuple[float, list[str]]:
    """Seconds from the command to the end of its first step, and all lines that it printed."""
    began, seconds, lines = time.perf_counter(), 0.0, []
    command = [sys.executable, "train_gpt2_fp32.py", *flags]
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}  # ours, set by kernels.target
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**inherited, **environment}) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step") and not seconds:
                seconds = time.perf_counter() - began
    if process.returncode:
        raise DataError(f"{' '.join(command)} ended with {process.returncode}: nothing of it is kept")
    return seconds, lines


# ---- the processor ----


def measure_cpu(prefix: str, steps: int = 5) -> None:
    """Seconds a step at d12, B = 4, ours and PyTorch's by turns in one process; and the peak memory of the trainer by itself."""
    import resource

    try:
        import torch
    except ImportError:
        raise DataError("--cpu sets PyTorch's step beside ours: pip install torch") from None

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    found = {"cpu": _cpu_name(), "cores": cores, "packages": card()["packages"] | {"torch": torch.__version__}, "steps": []}
    found["commit"] = commit()
    peaks = {}  # first, while this process is small: a child's peak is never below what its parent has when it begins
    for T in (64, 256):
        _run_trainer(["-i", prefix, "-e", "d12", "--device", "cpu", "-t", str(T), "-x", "3", "-m", "1", "-s", "0"], {})
        peaks[T] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    for T in peaks:
        ours, theirs = GPT2.random("d12", "cpu", report=lambda line: None), TorchStep(random_parameters_of("d12"), device="cpu")
        loader, numbers = DataLoader(f"{prefix}_train.bin", B, T), itertools.count(1)
        times = {"ours": [], "PyTorch": []}
        for i in range(steps + 1):
            batch = loader.next_batch()
            runs = {"ours": lambda: ours.train_step(*batch, 3e-4, next(numbers)), "PyTorch": lambda: theirs(*batch)}  # noqa: B023
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                if i:  # the first compiles, and touches its memory for the first time
                    times[name].append(time.perf_counter() - began)
        row = {"T": T, "peak MiB": peaks[T]} | {name: statistics.median(seconds) for name, seconds in times.items()}
        found["steps"].append(row)
        print(row, flush=True)
    write(FOLDER / "CPU.json", found)


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


# ---- the file ----


def results_file() -> Path:
    return FOLDER / f"{card()['card'].replace(' ', '-')}.json"


def load() -> dict:
    return read_json(results_file(), "delete it to measure all of it anew") if results_file().exists() else {}


@functools.cache
def commit() -> str:
    """What is measured; empty outside of a git checkout."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def save(results: dict) -> None:
    facts = {**card(), "roofline": roofline()}
    write(results_file(), facts | {key: value for key, value in results.items() if key not in facts})


def write(file: Path, results: dict) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with replacing(file) as opened:
        opened.write((json.dumps(results, indent=1) + "\n").encode())


def main() -> None:
    parser = Arguments(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="*", metavar="NAME")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--unchecked", action="store_true", help="only time: where `make test-gpu` has just passed")
    parser.add_argument("-i", default="data/tiny_shakespeare", metavar="PREFIX", help="the tokens to train on")
    asked = parser.parse_args()
    if asked.cpu:
        corpus.require(asked.i)
        return measure_cpu(asked.i)
    if TARGET != "gpu":
        sys.exit("kernels/bench.py measures a GPU, and there is none here; --cpu measures the processor")
    everything = asked.ops is None and not (asked.steps or asked.losses or asked.trainer)
    if everything or asked.steps or asked.losses or asked.trainer:
        corpus.require(asked.i)  # before what takes long
    unmatched = [name for name in asked.ops or [] if not any(name in op for op in load_all())]
    if unmatched:
        sys.exit(f"no op's name has {unmatched[0]} in it; there are {', '.join(sorted(load_all()))}")
    results = load()
    if everything or asked.ops is not None:
        measure_ops(asked.ops or [], results, not asked.unchecked)
    if everything or asked.steps:
        measure_steps(asked.i, results)
    if everything or asked.losses:
        compare_losses(asked.i, results)
    if everything or asked.trainer:
        measure_trainer(asked.i, results)
    cuda.synchronize()


if __name__ == "__main__":
    run_script(main)
