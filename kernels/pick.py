"""Pick the fastest right version of every op for this card: `python kernels/pick.py [OP ...]` writes kernels/picked.toml.

model.py reads the file. A card that has no table of its own uses `default`. A version that gives the same bits every run is
picked unless it costs more than 5% and more than 50 us: a training step takes thousands, and two runs that agree to the last
bit are worth some of them. (With -f 3, three products of TF32 for one, an op that can do so takes its last version instead.)

What is fastest by itself need not be beside what runs aside in a step. With --step, those that come within a quarter of the
fastest are tried in the training step itself (GPT-2 124M, B = 4, T = 1024), and its time decides.
"""

import functools
import signal
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # a script's own folder is there: the repo's root should be
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all else is imported: no traceback

from data.files import Arguments, DataError, run_script, shown, write_text

FILE = Path(__file__).parent / "picked.toml"
IN_STEP_RATIO = 1.25
SAME_BITS_RATIO, SAME_BITS_US = 1.05, 50.0  # what they may cost


def read_picks() -> dict[str, dict[str, int]]:
    """Card -> op -> version."""
    try:
        tables = tomllib.loads(FILE.read_text()) if FILE.exists() else {}
        for name, picks in tables.items():
            if not isinstance(picks, dict) or not all(type(number) is int and number >= 0 for number in picks.values()):
                raise ValueError(f"[{name}] is no table of ops and version numbers")
        return tables
    except (OSError, ValueError) as error:
        raise DataError(f"{shown(FILE)} cannot be read ({error}): delete it, and kernels/pick.py writes it") from None


def picks_for_this_card(tf32: int = 1) -> dict[str, int]:
    """op -> version, for the card that is here. The table is one of single products: with tf32 = 3 it says nothing of an op that
    can take three products of TF32 for one."""
    from kernels.device import card_name
    from kernels.op import load_all

    tables = read_picks()
    picks = {**tables.get("default", {}), **tables.get(card_name(), {})}
    if tf32 == 3:
        for name, op in load_all().items():
            if any(version.precision == "3xtf32" for version in op.versions.values()):
                picks.pop(name, None)
    return picks


def write_picks(tables: dict[str, dict[str, int]]) -> None:
    lines = ["# Written by kernels/pick.py: the version of every op that model.py uses, by card.\n"]
    for name, picks in tables.items():
        lines += [f'\n["{name}"]\n'] + [f"{op} = {number}\n" for op, number in sorted(picks.items())]
    write_text(FILE, "".join(lines))


def choose(times: dict[int, float], repeatable: set[int]) -> int:
    """version -> us: the fastest, or a repeatable one that is not much slower."""
    fastest = min(times, key=times.get)
    steady = {number: time for number, time in times.items() if number in repeatable}
    if steady:
        best = min(steady, key=steady.get)
        if steady[best] <= max(SAME_BITS_RATIO * times[fastest], times[fastest] + SAME_BITS_US):
            return best
    return fastest


def pick_from(op, rows: list, in_step: bool = False) -> int | None:
    """The version to use, from the rows (kernels.ladder.Row) of an op at every shape of the trainer; None where none is
    right at all of them. in_step: whether the time of a training step decides between those that are nearly as fast."""
    times = times_of(rows)
    near = [number for number, time in times.items() if time <= IN_STEP_RATIO * min(times.values())]
    if in_step and len(near) > 1:
        times = times_of_steps(op, near) or times
    return choose(times, {v.number for v in op.versions.values() if v.repeatable}) if times else None


def times_of(rows: list) -> dict[int, float]:
    """version -> us at all shapes together, of those that are right at all of them."""
    shapes: dict[tuple, dict[int, float]] = {}  # what was right, with its time, by shape
    for row in rows:
        right_here = shapes.setdefault(tuple(row.shape.items()), {})
        if row.us is not None and row.right is not False:
            right_here[row.version] = row.us
    everywhere = set.intersection(*(set(times) for times in shapes.values())) if shapes else set()
    return {number: sum(times[number] for times in shapes.values()) for number in everywhere}


def times_of_steps(op, numbers: list[int]) -> dict[int, float]:
    """version -> us of a training step with it; empty where a step does not call the op."""
    from itertools import count

    import numpy as np

    from kernels.timing import median_ms
    from model import GPT2, config_of_size, random_parameters

    config = config_of_size("d12")
    parameters, tokens = random_parameters(config, 1337), np.random.default_rng(1337).integers(0, config.vocab_size, (4, 1025))
    times = {}
    for number in numbers:
        model, steps = GPT2(config, parameters, "cuda", report=lambda line: None, kernels={op.name: number}), count(1)
        step = functools.partial(model.train_step, tokens[:, :-1], tokens[:, 1:], 3e-4)
        times[number] = 1e3 * median_ms(lambda: step(next(steps)), 40)  # noqa: B023
        is_called = op.name in model.backend.picked.called()
        model.close()
        if not is_called:
            return {}
    return times


def keep_pick(op: str, number: int) -> None:
    """Into the table of this card, and into the default one: a card that nobody has measured uses what this one does."""
    from kernels.device import card_name

    tables = read_picks()
    for name in ("default", card_name()):
        tables.setdefault(name, {})[op] = number
    write_picks(tables)


def main() -> None:
    parser = Arguments(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops; the others keep their picks")
    parser.add_argument("--step", action="store_true", help="let the time of a training step decide between the fastest")
    asked = parser.parse_args()

    from rich.console import Console

    from kernels.device import TARGET
    from kernels.ladder import measure
    from kernels.op import load_all

    console = Console(highlight=False)
    if TARGET != "gpu":
        sys.exit("kernels/pick.py times kernels, so it needs a CUDA GPU; kernels/picked.toml comes with defaults")
    ops = load_all()
    unknown = [name for name in asked.ops if name not in ops]
    if unknown:
        sys.exit(f"no op is called {unknown[0]}; there are {', '.join(sorted(ops))}")

    for op in [ops[name] for name in asked.ops] or ops.values():
        rows = [row for shape in op.trainer_shapes or [op.shape] for row in measure(op, shape, keep_going=True)]
        for row in rows:
            if row.right is False:
                console.print(f"[red]{op.name} {row.version} is wrong at {row.shape}: {row.refused or row.errors}[/red]")
        number = pick_from(op, rows, in_step=asked.step)
        if number is None:
            console.print(f"[red]{op.name}: no version is right at the trainer's shapes[/red]")
            continue
        ladder = "  ".join(f"{row.version}: {row.us:.1f}" for row in rows if row.us)
        console.print(f"{op.name:32} version {number:2}   us by version  {ladder}")
        keep_pick(op.name, number)  # as it goes: an interrupted run loses nothing


if __name__ == "__main__":
    run_script(main)
