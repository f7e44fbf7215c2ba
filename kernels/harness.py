"""The command line of every layer: `python kernels/<layer>/run.py`. Checks versions, times them on a GPU, prints the ladder.

Without a GPU the same check runs in the simulator on a small problem.
"""

import argparse
import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from traceback import walk_tb
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from data.files import DataError, end_by_ctrl_c, flush_output, heed_ctrl_c, is_one_of, shown, write_text

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
SIZES = {
    "B": "sequences", "T": "tokens of a sequence", "C": "channels", "N": "rows, B * T", "NH": "heads", "hs": "channels of a head",
    "OC": "channels that go out", "V": "the vocabulary", "Vp": "the vocabulary, padded",
}  # fmt: skip
SWITCHES = {"zipf": "1: some tokens are frequent, as in text", "accumulate": "1: the product is added to what is there"}
YOURS = 999  # the number under which a learner's launcher joins the ladder
YOUR_MODULE = "your_kernel"  # whatever the file is called: numpy.py must not take numpy's place


def stop(message: str) -> NoReturn:
    line = message.replace("\n", "\\n")  # a file's name may hold one
    print(f"error: {line}", file=sys.stderr)
    sys.exit(1)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"usage: {self.prog} [options], which --help lists", file=sys.stderr)
        stop(message)


def main(layer: str, arguments: list[str] | None = None) -> None:
    """What `python kernels/<layer>/run.py` does. Exits with 1 where a version is wrong or the question makes no sense."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        from kernels.op import of_layer

        ops = of_layer(layer)
        heed_ctrl_c()  # not before: an import may turn a KeyboardInterrupt into an error of its own
        answer(parse(layer, ops, words), ops)
    except KeyboardInterrupt:
        end_by_ctrl_c("stopped by Ctrl-C", sys.stderr)
    except Exception as error:
        if "--verbose" in words:
            raise
        flush_output()  # where that is the error, nothing is left to tell
        stop(in_one_line(error))
    finally:
        flush_output()


def answer(asked: argparse.Namespace, ops: list) -> None:
    """Runs what was asked, prints it and keeps it."""
    ops = [op for op in ops if asked.pass_ in (None, op.pass_, op.name)]
    if asked.list:
        return list_versions(ops)
    if asked.template:
        return write_template(ops[0], asked.template)
    if asked.file:
        ops = ops[:1]
        load_file(ops[0], asked.file)
    if asked.version != "all":  # not all ops of a layer need to have it
        ops = [op for op in ops if int(asked.version) in op.versions] or ops
    versions = [chosen(op, asked) for op in ops]  # of all the ops, before the first is run
    rows = [row for op, of_op in zip(ops, versions, strict=True) for row in run(op, of_op, asked)]
    if asked.json:
        from kernels.ladder import write_json

        keep("--json", asked.json, lambda: write_json(asked.json, rows))
    if asked.plot:
        from kernels.plot import plot_ladder

        keep("--plot", asked.plot, lambda: plot_ladder(rows, asked.plot))
    sys.exit(any(row.right is False for row in rows) or all(row.refused for row in rows))


def keep(flag: str, file: str, write: Callable[[], object]) -> None:
    try:
        write()
    except (OSError, DataError) as error:
        reason = error.__cause__ or error
        stop(f"{flag} {file}: it cannot be written ({getattr(reason, 'strerror', None) or reason}): name another file")


def parse(layer: str, ops: list, arguments: list[str]) -> argparse.Namespace:
    from kernels.target import TARGET

    parser = Parser(prog=f"kernels/{layer}/run.py", description=f"Check and time the versions of {layer}.")
    parser.add_argument("--version", default="all", metavar="N", help="a version's number, or all (the default)")
    passes = list(dict.fromkeys([op.pass_ for op in ops] + [op.name for op in ops]))
    listed = f"one of {', '.join(passes)}; else all of them"
    parser.add_argument("--pass", dest="pass_", choices=passes, metavar="PASS", help=listed)
    parser.add_argument("--block-size", type=int, metavar="N", help="threads a block; else each version's own choice")
    parser.add_argument("--tf32", type=int, choices=(0, 1), default=1, help="0: cuBLAS too computes in fp32")
    parser.add_argument("--file", metavar="FILE", help="a launcher of your own, named as the op is, joins the ladder")
    parser.add_argument("--template", metavar="FILE", help="write such a file to start from: version 1, standing alone")
    parser.add_argument("--list", action="store_true", help="the versions and their descriptions, nothing run")
    parser.add_argument("--json", metavar="FILE", help="keep the result, with card, driver and package versions")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the ladder against the roofline")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--verbose", action="store_true", help="a failure's whole traceback")
    shape = parser.add_argument_group(
        "the shape (else the one that the docs' tables use; in the simulator a small one)"
    )
    names = list(dict.fromkeys(name for op in ops for name in op.shape))
    for name in names + [name for name in "BT" if "N" in names and name not in names]:
        shape.add_argument(f"-{name}", type=int, dest=f"shape_{name}", metavar="N", help=(SIZES | SWITCHES)[name])
    asked = parser.parse_args(arguments)
    asked.shape = {
        n.removeprefix("shape_"): v for n, v in vars(asked).items() if n.startswith("shape_") and v is not None
    }
    for name in ("file", "template", "json", "plot"):
        if getattr(asked, name) == "":
            stop(f"--{name}: name a file")
    for name in ("json", "plot"):
        written = getattr(asked, name)
        if asked.file and written and is_one_of(written, [asked.file]):
            stop(f"--{name} {written}: it is the --file that this run reads: name another file")
    if asked.list and (asked.json or asked.plot or asked.template or asked.file):
        stop("--list runs nothing and writes nothing: leave the other out")
    if TARGET == "compile":
        stop("LLM_NUMBA_TARGET=compile runs nothing: `python -m kernels.compile` compiles, or leave it out")
    for name, size in asked.shape.items():
        if name in SWITCHES and size not in (0, 1):
            stop(f"-{name} {size}: it takes 0 or 1")
        if name not in SWITCHES and size < 1:
            stop(f"-{name} {size}: a size is 1 or more")
    if asked.block_size is not None and not (1 <= asked.block_size <= 1024):
        stop(f"--block-size {asked.block_size}: a block has 1 to 1024 threads")
    if asked.seed < 0:
        stop(f"--seed {asked.seed}: a seed is 0 or more")
    if asked.version != "all" and not asked.version.isdecimal():
        stop(f"--version {asked.version}: use a number, or all")
    if asked.plot and Path(asked.plot).suffix not in (".svg", ".png"):
        stop(f"--plot {asked.plot}: name a .svg or a .png file")
    if asked.plot and TARGET != "gpu":
        unwritten = f" (nothing was run, and {asked.json} is not written)" if asked.json else ""
        stop(f"--plot {asked.plot}: it draws times, and those take a GPU, which is not here: leave it out{unwritten}")
    return asked


def chosen(op, asked: argparse.Namespace) -> list:
    """The versions of one op that were asked for."""
    numbers = list(op.versions) if asked.version == "all" else [int(asked.version)]
    if asked.version != "all" and numbers[0] not in op.versions:
        have = ", ".join(str(number) for number in op.versions if number != YOURS)
        stop(f"{op.name} has no version {numbers[0]}; it has {have}")
    versions = [op.versions[number] for number in dict.fromkeys([*numbers, *([YOURS] if asked.file else [])])]
    fixed = [version for version in versions if "block_size" not in version.options()]
    if asked.block_size and asked.version != "all" and fixed:
        name = asked.file if fixed[0].number == YOURS else f"{op.name} {fixed[0].number}"
        stop(f"--block-size: {name} chooses its own")
    return versions


def run(op, versions: list, asked: argparse.Namespace) -> list:
    """Measures these versions of one op, and prints its table."""
    from kernels.device import SIMULATE
    from kernels.ladder import measure

    shape = shape_of(op, asked.shape)
    one = versions[0] if len(versions) == 1 and asked.version != "all" else None
    sweep = one and not SIMULATE and asked.block_size is None and "block_size" in one.options()
    block_sizes = BLOCK_SIZES if sweep else [asked.block_size]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task(op.name, total=len(versions) * len(block_sizes) + 1)

        def progress(text: str) -> None:
            bar.update(task, description=text, advance=1)

        options = {"tf32": bool(asked.tf32), "seed": asked.seed, "progress": progress}
        try:
            rows = measure(op, shape, versions, block_sizes=block_sizes, **options)
        except SystemExit:
            stop(f"{asked.file or op.name} exits as it is launched: a launcher returns, a kernel too")
        except (MemoryError, OverflowError) as error:
            flags = " ".join(f"-{name} {size}" for name, size in asked.shape.items())
            raise MemoryError(f"{error} ({flags})" if flags else str(error)) from error
    print_table(op, shape, rows)
    return rows


def shape_of(op, asked: dict) -> dict:
    """The op's shape with what was asked in its place; -B and -T give the rows N where the op knows only rows."""
    from kernels.device import SIMULATE

    shape = dict(op.small if SIMULATE else op.shape)
    known = {name: size for name, size in asked.items() if name in shape}
    if "N" in shape and "N" not in asked and {"B", "T"} & asked.keys() and "B" not in shape:
        known["N"] = asked.get("B", 1 if SIMULATE else 8) * asked.get("T", 8 if SIMULATE else 1024)
    return {**shape, **known}


def print_table(op, shape: dict, rows: list) -> None:
    from kernels.device import SIMULATE
    from kernels.ladder import card
    from kernels.op import PRECISION_NAMES

    console = Console(highlight=False, width=None if sys.stdout and sys.stdout.isatty() else 150)
    sizes = ", ".join(f"{name} = {size}" for name, size in shape.items())
    small = ", on a small problem" if shape == op.small else ""
    where = f"no GPU here: checked in the simulator{small}" if SIMULATE else card()["card"]
    console.print(f"[bold]{op.name}[/bold], {sizes} [dim]({where})[/dim]", soft_wrap=True)
    table = Table()
    swept = len({row.block_size for row in rows}) > 1 and len({row.version for row in rows}) == 1
    table.add_column("block size" if swept else "version", justify="right")
    table.add_column("what it does", ratio=1)
    table.add_column("result")
    timed = any(row.us is not None for row in rows)
    if timed:
        for name in (
            "us",
            "10-90%",
            "TFLOP/s" if op.flops else "GB/s",
            "of roofline",
            "speed-up",
            "registers",
            "shared",
            "occupancy",
        ):
            table.add_column(name, justify="right")
    first = rows[0].us
    for row in rows:
        name = str(row.block_size) if swept else "yours" if row.version == YOURS else str(row.version)
        precision = PRECISION_NAMES[row.precision]
        cells = [name, escape(row.description) + f" [dim]({precision})[/dim]" * bool(precision)]
        cells.append(f"[yellow]{escape(row.refused)}[/yellow]" if row.refused else verdict(row))
        if timed and row.us is not None:
            rate = f"{row.tflops:.1f}" if op.flops else f"{row.gbps:.0f}"
            kernels = row.kernels
            cells += [
                f"{row.us:.1f}", f"{row.us_low:.1f}-{row.us_high:.1f}", rate, f"{100 * row.of_roofline:.0f}%",
                f"{first / row.us:.1f}x" if first else "",
                "+".join(str(k.registers) for k in kernels) + (" [red]spills[/red]" if any(k.local for k in kernels) else ""),
                "+".join(f"{k.shared}" for k in kernels), "+".join(f"{100 * k.occupancy:.0f}%" for k in kernels),
            ]  # fmt: skip
        table.add_row(*cells)
    console.print(table)


def verdict(row) -> str:
    from kernels.check import allowed
    from kernels.op import OPS

    errors = ", ".join(f"{name} {error:.1e}" for name, error in row.errors.items())
    if math.inf in row.errors.values():
        errors += " (inf: a NaN or an infinity is there, or nothing was written)"
    if row.right:
        return f"[green]{errors}[/green]"
    limit = allowed(OPS[row.op].versions[row.version], row.precision)
    return f"[bold red]WRONG: {errors}; at most {limit:.0e} is right[/bold red]"


def list_versions(ops: list) -> None:
    from kernels.op import PRECISION_NAMES

    console = Console(highlight=False)
    for op in ops:
        console.print(f"[bold]{op.name}[/bold]({', '.join(op.arguments)})", soft_wrap=True)
        for version in op.versions.values():
            notes = [PRECISION_NAMES[version.precision], "" if version.repeatable else "not repeatable to the bit"]
            notes += ["compute capability {}.{}".format(*version.needs_cc)] if version.needs_cc > (8, 0) else []
            note = f" [dim]({', '.join(filter(None, notes))})[/dim]" * any(notes)
            console.print(f"  {version.number:3}  {escape(version.description)}{note}", soft_wrap=True)


def load_file(op, file: str) -> None:
    """Registers the function of the op's name in this file as one more version."""
    if not Path(file).is_file():
        what = "no file of text" if Path(file).exists() else f"no such file; --template {file} writes one to start from"
        stop(f"{file}: {what}")
    spec = importlib.util.spec_from_file_location(YOUR_MODULE, file, loader=SourceFileLoader(YOUR_MODULE, file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.get_code(spec.name)
    except (SyntaxError, ValueError) as error:  # a ValueError: a null byte
        stop(f"{file}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}")
    try:
        spec.loader.exec_module(module)
    except SystemExit:
        stop(f"{file} exits as it is loaded: put what does that under `if __name__ == '__main__':`")
    launcher = getattr(module, op.name, None)
    if not callable(launcher):
        stop(f"{file} has no function {op.name}({', '.join(op.arguments)}); --template FILE writes one to start from")
    try:
        inspect.signature(launcher).bind(*op.arguments)
    except TypeError as error:
        stop(f"{file}: {op.name} is called with ({', '.join(op.arguments)}): {error}")
    op.version(YOURS, f"{Path(file).name}")(launcher)


def write_template(op, file: str) -> None:
    """Version 1 of the op as a file of its own."""
    from kernels.template import standing_alone

    if Path(file).exists():
        stop(f"{file} is there already: name another file")
    source = standing_alone(op.versions[min(n for n in op.versions if n)])
    keep("--template", file, lambda: write_text(file, source))
    print(f"wrote {file}: change it, then run with --file {file}")


def in_one_line(error: Exception) -> str:
    """Numba's errors fill a screen. What matters is where in the kernel it is, and the sentence. Where the text names no
    place, it is the last line that ran of a layer's file or a learner's."""
    text = str(error)
    frames = [(frame.f_globals, frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    ran = [(names.get("__name__", ""), file, line) for names, file, line in frames]  # code that was given to exec has no name
    if any(module.endswith(".core.caching") for module, *_ in ran):  # numba's; a power cut may leave a damaged file there
        folder = os.environ.get("NUMBA_CACHE_DIR")  # which kernels.target has set
        if isinstance(error, OSError):
            return f"{folder}, where compiled code is kept: {error.strerror}: make room, or set XDG_CACHE_HOME to another folder"
        return f"{folder} has a damaged file of compiled code ({text}): delete the folder, the next run fills it anew"
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    mine = [(name, line) for name, line in places if "site-packages" not in name]
    if not mine and not isinstance(error, MemoryError):
        mine = [(file, line) for module, file, line in ran if re.fullmatch(rf"{YOUR_MODULE}|kernels\.\w+\.\w+", module)]
        mine = [(file, line) for file, line in mine if Path(file).name not in text]
    sentences = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.startswith(("File ", "-", "During", "\x1b"))
    ]
    what = next((line for line in sentences if not line.startswith("Failed in")), type(error).__name__)
    where = f"{shown(mine[-1][0])}:{mine[-1][1]}: " if mine else ""
    more = " (--verbose shows all of it)" if len(sentences) > 1 else ""
    return f"{where}{what}{more}"
