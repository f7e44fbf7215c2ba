"""Trains GPT-2 in float32, on a GPU or on the CPU: llm.c's train_gpt2_fp32.cu from Python.

    python train_gpt2_fp32.py -i data/tiny_shakespeare -g 64

The flags, the lines it prints and the log file are that program's, and from the same logits it samples the same tokens.
To be read from the top: the flags, the sampler, the table, the loop. The model is in model.py, its layers are in kernels/
for the GPU and in cpu_reference.py for the CPU.
"""

import codecs
import contextlib
import math
import os
import signal
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C until main runs: no traceback of an import

import numpy as np

from data.files import DataError, end_by_ctrl_c, flush_output, heed_ctrl_c, is_one_of

# numba and all that needs it are imported further down, so that the first line stands there at once.

# ---------------------------------------------------------------------------------------------------------------------
# command line


@dataclass(frozen=True)
class Flag:
    """What may follow a flag (nothing, if its default is False), and what the usage says of it."""

    default: object
    usage: str
    kind: type = str
    least: float = 0
    choices: tuple = ()

    def read(self, flag: str, word: str) -> object:
        """The word that follows, as a value. Raises DataError."""
        if self.kind is str:
            if self.choices and word not in self.choices:
                raise DataError(f"{flag} {word}: it is one of {', '.join(self.choices)}")
            return word
        try:
            value = self.kind(word)
        except ValueError:
            value = math.nan
        if not self.least <= value < math.inf or (self.choices and value not in self.choices):
            needed = " or ".join(map(str, self.choices)) or f"a {'whole ' * (self.kind is int)}number from {self.least} up"
            raise DataError(f"{flag} {word}: it takes {needed}")
        return value


FLAGS = {
    "-i": Flag(None, "<string> input dataset prefix (default = data/tiny_shakespeare)"),
    "-o": Flag(None, "<string> output log file (default = NULL)"),
    "-b": Flag(4, "<int>    batch size B (default = 4)", int, least=1),
    "-t": Flag(None, "<int>    sequence length T (default = 1024, on the CPU 64)", int, least=1),
    "-l": Flag(3e-4, "<float>  learning rate (default = 3e-4)", float),
    "-v": Flag(20, "<int>    val_loss_every, how often we evaluate val loss, 0 is never (default = 20)", int),
    "-m": Flag(20, "<int>    val_max_batches, up to how many val batches to estimate val loss (default = 20)", int, least=1),
    "-s": Flag(20, "<int>    sample_every, how often we inference the model, 0 is never (default = 20)", int),
    "-g": Flag(64, "<int>    genT, how many steps of inference we do (default = 64)", int),
    "-e": Flag(None, "<string> a checkpoint, or random weights of a size: d2, d4, d6, d12, d24, d36, d48\n"
               "              (default = gpt2_124M.bin where that file is, else d12)"),
    "-x": Flag(None, "<int>    stop after so many steps (default = one epoch, on the CPU 40)", int, least=1),
    "-f": Flag(1, "<int>    matrix products: 1 rounds to TF32, 0 is float32 arithmetic, 3 makes three products of TF32\n"
               "              for each, with float32's digits (default = 1; on a CPU all is float32)", int, choices=(0, 1, 3)),
    "-r": Flag(0, "<int>    1 recomputes GELU in the backward pass, to save memory (default = 0)", int, choices=(0, 1)),
    "--device": Flag("auto", "<string> cuda, cpu, or auto: the GPU where there is one (default = auto)",
                     choices=("auto", "cuda", "cpu")),
    "--kernel": Flag((), "<string> a version instead of the picked one, as layernorm_forward=3; may be given again\n"
                     "                     (needs a GPU)"),
    "--fused": Flag(1, "<int>    0 runs simple kernels in place of fused ones (default = 1; needs a GPU)", int, choices=(0, 1)),
    "--graph": Flag(1, "<int>    0 launches every kernel from Python, without CUDA graphs (default = 1; needs a GPU)", int,
                    choices=(0, 1)),
    "--profile": Flag(False, "prints at the end what each kernel takes of a step (needs a GPU)"),
    "--verbose": Flag(False, "prints the whole traceback of an error"),
}  # fmt: skip


def usage() -> str:
    lines = ["Usage:   python train_gpt2_fp32.py [options]"]
    lines += ["Example: python train_gpt2_fp32.py -i data/tiny_shakespeare -v 100 -s 100 -g 144 -o shakespeare.log", "Options:"]
    return "\n".join(lines + [f"  {name:<{2 if len(name) == 2 else 9}} {flag.usage}" for name, flag in FLAGS.items()])


def read_flags(words: list[str]) -> dict:
    """A value for each flag. A flag that there is not, or one with nothing after it, is named above the usage, exit 1."""
    args = {name: flag.default for name, flag in FLAGS.items()}
    words = list(words)
    while words:
        name = words.pop(0)
        if name in ("-h", "--help"):
            print(usage())
            sys.exit(0)
        if name not in FLAGS:
            sys.exit(f"error: there is no flag {name}\n{usage()}")
        if FLAGS[name].default is not False and not any(words[:1]):  # none, or ""
            sys.exit(f"error: {name} takes a value\n{usage()}")
        if FLAGS[name].default is False:
            args[name] = True
        elif name == "--kernel":
            args[name] += (words.pop(0),)
        else:
            args[name] = FLAGS[name].read(name, words.pop(0))
    return args


def read_kernels(words: tuple[str, ...], device: str, tf32: int) -> dict[str, int]:
    """From layernorm_forward=3 and so on: the version of each op that was asked for. Raises DataError."""
    if not words:
        return {}
    from kernels.op import PRECISIONS, load_all

    ops, kernels = load_all(), {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in ops:
            raise DataError(f"--kernel {word}: no op is called {name}; there are {', '.join(sorted(ops))}")
        version = next((version for version in ops[name].versions.values() if str(version.number) == number), None)
        if version is None:
            raise DataError(f"--kernel {word}: {name} has the versions {', '.join(map(str, ops[name].versions))}")
        if device == "cpu":
            raise DataError(f"--kernel {word}: kernels run on a GPU, on the CPU each layer has one version: leave it out")
        if reason := version.why_not():
            raise DataError(f"--kernel {word}: it {reason}")
        if version.precision not in PRECISIONS[tf32]:
            single = "single products of TF32" if tf32 else "TF32"
            raise DataError(f"--kernel {word}: it computes in {single}, which -f {tf32} rules out")
        kernels[name] = version.number
    return kernels


# ---------------------------------------------------------------------------------------------------------------------
# sampler: takes logits and samples tokens from them


class Xorshift:
    """Random numbers as llm.c draws them (xorshift64*: Marsaglia 2003, Vigna 2016)."""

    def __init__(self, state: int = 1337):
        self.state = state

    def random_u32(self) -> int:
        self.state ^= self.state >> 12
        self.state ^= self.state << 25 & 0xFFFFFFFFFFFFFFFF
        self.state ^= self.state >> 27
        return (self.state * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF) >> 32

    def random_f32(self) -> float:
        """In [0, 1), a multiple of 2**-24."""
        return (self.random_u32() >> 8) / 16777216


def compile_sample_softmax():
    """Returns sample_softmax(logits, coin): a token from float32 logits (V,) and a random number in [0, 1).

    Types, and the order of the sums, are those of the C function: a float32 more or less would be another token.
    """
    from numba import njit

    @njit(cache=True)
    def sample_softmax(logits, coin):
        norm = 0.0
        for logit in logits:
            norm += math.exp(logit)  # float32, as C's expf, summed in float64
        threshold = np.float32(np.float32(coin) * norm)  # in place of a division of every exponential by the norm
        cdf = np.float32(0)
        for token in range(len(logits)):
            cdf += math.exp(logits[token])
            if threshold < cdf:
                return token
        return len(logits) - 1  # the rounding of cdf may leave it below the threshold

    return sample_softmax


def generate(model, genT: int, sample_softmax, rng: Xorshift) -> None:
    """Prints genT - 1 tokens as they are sampled, from an end-of-text token on."""
    from data.tokenizer import END_OF_TEXT, decode_bytes

    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end in the middle of a character
    tokens = [min(END_OF_TEXT, model.config.vocab_size - 1)]
    print("generating:\n---")
    for _ in range(1, genT):
        tokens.append(sample_softmax(model.next_logits(tokens), rng.random_f32()))
        text = decoder.decode(decode_bytes(tokens[-1:]))
        print("".join(c for c in text if c.isprintable() or c.isspace()), end="", flush=True)
    print("\n---", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# what it runs on, and what it starts from

RULE = "+-----------------------+----------------------------------------------------+"


def row(name: str, value: object) -> None:
    for line in textwrap.wrap(str(value), 50, break_long_words=False, break_on_hyphens=False) or [""]:
        print(f"| {name:<21} | {line:<50} |", flush=True)
        name = ""


def pick_device(asked: str) -> str:
    """Returns "cuda" or "cpu". Raises DataError."""
    from kernels.target import TARGET  # before numba: it says where compiled code is kept

    if asked == "cuda" and TARGET != "gpu":
        raise DataError("--device cuda: no GPU that CUDA can use was found: leave it out, or use --device cpu")
    return "cuda" if TARGET == "gpu" and asked != "cpu" else "cpu"


def set_up(device: str) -> str:
    """Returns the device's name."""
    if device == "cpu":
        import numba

        from kernels.progress import name_what_compiles

        name_what_compiles()
        threads = numba.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads > 1)}"
    from kernels.ladder import card

    return card()["card"]


def show_products(ops) -> None:
    """The version that the matrix products begin with, and why cuBLAS is none where it is not to be had."""
    from kernels.cublas import missing

    picked = ops.ladder("matmul_forward")[0]
    row("matrix products", f"version {picked.number}: {picked.description}")
    if missing():
        row("cuBLAS", missing())


def products_of_tf32(asked: int, device: str) -> int:
    """How many make one matrix product: as many as asked for, where there is TF32."""
    if device == "cpu":
        return 0
    from kernels.device import compute_capability

    return asked if compute_capability() >= (8, 0) else 0


def starting_weights(asked: str | None) -> str:
    """The checkpoint to read, or the size of a model to start from random weights. Raises DataError."""
    from model import SIZES

    if asked and asked not in SIZES and Path(asked).stem == asked and not Path(asked).exists():
        raise DataError(f"-e {asked}: there is no such file, and the sizes are {', '.join(SIZES)}")
    places = [folder / "gpt2_124M.bin" for folder in (Path(), Path(__file__).parent)]
    return asked or next((str(path) for path in places if path.is_file()), "d12")


def check(args: dict, weights: str) -> int:
    """Raises DataError for what can be told before the table is begun. Returns the model's max_seq_len."""
    from data import checkpoint, corpus
    from model import SIZES, config_of_size

    if args["-i"] is not None:
        corpus.require(args["-i"])
    longest = (config_of_size(weights) if weights in SIZES else checkpoint.read_checkpoint(weights)[0]).max_seq_len
    for flag in ("-t", "-g"):
        if args[flag] is not None and args[flag] > longest:
            raise DataError(f"{flag} {args[flag]} is above the model's max_seq_len of {longest}: lower {flag}")
    if args["--device"] == "cuda" or args["--kernel"] or args["--profile"]:  # these alone need numba, which takes its time
        device = pick_device(args["--device"])
        read_kernels(args["--kernel"], device, products_of_tf32(args["-f"], device))
        if args["--profile"] and device == "cpu":
            raise DataError("--profile times kernels on a GPU: leave it out on the CPU")
    return longest


class Logger:
    """The log file, or none. Each line is in it as soon as it is written. inputs: what the run reads, which it must not be."""

    def __init__(self, path: str | None, inputs: tuple = ()):
        self.path = path
        if path and is_one_of(path, inputs):
            raise DataError(f"-o {path}: it is what this run reads: name another file")
        with self.naming_it():
            self.file = path and open(path, "w", buffering=1)

    @contextlib.contextmanager
    def naming_it(self):
        try:
            yield
        except OSError as error:
            raise DataError(f"-o {self.path}: it cannot be written ({error.strerror}): name another file") from None

    def log_val(self, step: int, loss: float) -> None:
        self.write(f"s:{step} tel:{loss:.4f}\n")

    def log_train(self, step: int, loss: float) -> None:
        self.write(f"s:{step} trl:{loss:.4f}\n")

    def write(self, line: str) -> None:
        with self.naming_it():
            if self.file:
                self.file.write(line)


# ---------------------------------------------------------------------------------------------------------------------
# main training loop


def train(args: dict) -> None:
    B, T, learning_rate, genT = args["-b"], args["-t"], args["-l"], args["-g"]
    val_loss_every, val_max_batches, sample_every = args["-v"], args["-m"], args["-s"]

    from data import corpus

    weights = starting_weights(args["-e"])
    max_seq_len = check(args, weights)
    print(RULE)
    row("Parameter", "Value")
    print(RULE, flush=True)
    prefix, note = (args["-i"], "") if args["-i"] is not None else corpus.default_prefix()
    row("input dataset prefix", f"{prefix} ({note})" if note else prefix)
    row("output log file", args["-o"] or "NULL")
    row("batch size B", B)
    device = pick_device(args["--device"])
    T = T or min(64 if device == "cpu" else 1024, max_seq_len)
    row("sequence length T", T)
    row("learning rate", f"{learning_rate:f}")
    row("val_loss_every", val_loss_every)
    row("val_max_batches", val_max_batches)
    row("sample_every", sample_every)
    row("genT", genT)
    print(RULE)

    # set up the device
    tf32 = products_of_tf32(args["-f"], device)
    kernels = read_kernels(args["--kernel"], device, tf32)
    row("device", set_up(device))
    ignored = ": -f 3 needs a GPU from Ampere on" if args["-f"] == 3 and not tf32 else ""
    row("TF32", {0: "disabled", 1: "enabled", 3: "three products for each of float32"}[tf32] + ignored)
    print(RULE, flush=True)

    # build the GPT-2 model, from a checkpoint or from random weights
    from model import GPT2, SIZES

    options = {"kernels": kernels, "tf32": tf32, "graph": bool(args["--graph"]), "fused": bool(args["--fused"])}
    allocations: list[str] = []
    build = GPT2.random if weights in SIZES else GPT2.from_checkpoint
    model = build(weights, device, recompute=bool(args["-r"]), report=allocations.append, **options)
    config = model.config
    row("max_sequence_length T", config.max_seq_len)
    row("vocab_size V", config.vocab_size)
    row("padded_vocab_size Vp", config.padded_vocab_size)
    row("num_layers L", config.num_layers)
    row("num_heads NH", config.num_heads)
    row("channels C", config.channels)
    row("num_parameters", config.num_parameters)
    row("weights", f"random, of size {weights}" if weights in SIZES else weights)
    if device == "cuda":
        show_products(model.ops)
    print(RULE, flush=True)

    # build DataLoaders for both train and val
    from data.loader import DataLoader

    train_path, val_path = corpus.token_files(prefix)
    train_loader = DataLoader(train_path, B, T, config.vocab_size)
    val_loader = DataLoader(val_path, B, T, config.vocab_size)
    val_num_batches = min(val_loader.num_batches, val_max_batches)
    num_steps = args["-x"] or (40 if device == "cpu" else train_loader.num_batches)
    row("train_num_batches", train_loader.num_batches)
    row("val_num_batches", val_num_batches)
    if args["-x"]:
        row("stops after", f"{num_steps} steps (-x)")
    if device == "cpu" and not (args["-t"] and args["-x"]):
        defaults = [f"T = {T} (see -t)"] * (not args["-t"]) + ["stops after 40 steps (see -x)"] * (not args["-x"])
        row("on the CPU", ", ".join(defaults))
    print(RULE)
    print("\n".join(allocations), flush=True)
    model.report = lambda line: print(line, flush=True)

    logger = Logger(args["-o"], (weights, train_path, val_path))
    sample_softmax, rng = compile_sample_softmax(), Xorshift(1337)

    total_seconds = 0.0
    for step in range(num_steps + 1):
        last_step = step == num_steps

        # once in a while estimate the validation loss
        if val_loss_every and (step % val_loss_every == 0 or last_step):
            val_loader.reset()
            val_loss = sum(model.forward(*val_loader.next_batch()) for _ in range(val_num_batches)) / val_num_batches
            logger.log_val(step, val_loss)
            print(f"val loss {val_loss:f}", flush=True)

        # once in a while let the model write
        if sample_every and ((step > 0 and step % sample_every == 0) or last_step):
            generate(model, genT, sample_softmax, rng)

        # one more turn than there are steps, for the last evaluation and the last sample
        if last_step:
            break

        start = time.perf_counter()
        inputs, targets = train_loader.next_batch()
        loss = model.train_step(inputs, targets, learning_rate, step + 1)
        seconds = time.perf_counter() - start
        total_seconds += seconds
        logger.log_train(step, loss)
        speed = f"{1000 * seconds:f} ms, {int(B * T / seconds)} tok/s"
        print(f"step {step + 1:4d}/{num_steps}: train loss {loss:f} ({speed})", flush=True)
        if not (math.isfinite(loss) and math.isfinite(model.grad_norm)):
            remedy = "lower the learning rate (-l)" if step else "start from other weights (-e)"
            raise DataError(f"step {step + 1}: no finite number since {model.first_nonfinite()}: {remedy}")
    print(f"total average iteration time: {1000 * total_seconds / num_steps:f} ms", flush=True)

    if args["--profile"]:
        from kernels.profile import print_profile, profile_step

        print_profile(profile_step(model, *train_loader.next_batch(), learning_rate, num_steps + 1))


def main() -> None:
    verbose = "--verbose" in sys.argv
    heed_ctrl_c()
    if sys.stdout:  # None where the shell closed it
        sys.stdout.reconfigure(errors="replace")
    np.seterr(all="ignore")  # what is no finite number is found where the loss is
    try:
        train(read_flags(sys.argv[1:]))
    except KeyboardInterrupt:
        end_by_ctrl_c("stopped by Ctrl-C", sys.stdout)
    except BrokenPipeError:
        os._exit(1)  # whoever read our lines has gone: nobody is left to tell
    except DataError as error:
        sys.exit(f"error: {error}")
    except Exception as error:
        if verbose:
            raise
        from kernels.harness import in_one_line

        sys.exit(f"error: {in_one_line(error)}")
    finally:
        flush_output()


if __name__ == "__main__":
    main()
