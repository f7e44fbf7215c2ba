"""Fills the measured tables of the docs from doc/benchmarks/*.json: `python doc/fill_tables.py` (or `make doc-tables`).

A page says where a table goes; nobody types a number:

    <!-- table: layernorm_forward -->       the ladder at the op's shape
    <!-- table: layernorm_forward 2 3 -->   these two of its versions
    <!-- table: matmul_forward best -->     every shape that was timed, the best version beside version 0
    <!-- table: matmul_forward fp32 -->     the same with fp32 arithmetic, and with its digits out of three products of TF32
    <!-- table: large -->                   the best version of each op on arrays of a gigabyte
    <!-- table: steps -->                   the training step, ours and others
    <!-- table: without -->                 the step without the one or other idea
    <!-- table: profile -->                 where the time of a step goes
    <!-- table: losses -->                  how far our losses are from PyTorch's
    <!-- table: batches -->                 the step and its memory by batch size
    <!-- table: cpu -->                     the step on a processor, ours and PyTorch's
    <!-- table: starts -->                  how long a start takes, the host's share of a step, an epoch run twice
    <!-- table: card -->                    what all of it was measured with
    <!-- /table -->                         where it ends

`--check` writes nothing, and exits with 1 where a page would change. `--plots` draws doc/benchmarks/<op>.svg as well.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.files import Arguments, DataError, read_json, run_script, write_text

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "doc" / "benchmarks"
MARKER = re.compile(r"(<!-- table: (?P<what>[^>]*?) -->\n)(?P<old>.*?)(<!-- /table -->)", re.DOTALL)
APART = {  # measured once, on an H200, and not by kernels/bench.py
    "llm.c train_gpt2_fp32.cu with cuBLASLt": 27.2,
    "llm.c train_gpt2_fp32.cu, newest": 54.5,
}


def ladder_table(results: dict, op: str, only: set[int]) -> list[str]:
    from kernels.op import PRECISION_NAMES

    rows = [row for row in results["rows"] if row["op"] == op]
    if not rows:
        return [f"*{op} has not been measured yet.*"]
    shape = shape_of(op)
    rows = sorted((row for row in rows if row["shape"] == shape), key=lambda row: row["version"])
    unit = "TFLOP/s" if any(row["tflops"] for row in rows) else "GB/s"
    lines = [f"| version | what it does | us | {unit} | of the roofline | against version 1 |", "|--:|---|--:|--:|--:|--:|"]
    first = next((row["us"] for row in rows if row["version"] == 1), None)
    fastest = min((row["us"] for row in rows if row["us"] and row["right"] is not False), default=None)
    for row in rows:
        if only and row["version"] not in only:
            continue
        if not row["us"]:
            lines.append(f"| {row['version']} | {row['description']} | {row['refused'] or 'not measured'} | | | |")
            continue
        rate = f"{row['tflops']:.1f}" if row["tflops"] else f"{row['gbps']:,.0f}"
        gain = f"{first / row['us']:.1f}x" if first else ""
        number = f"**{row['version']}**" if row["us"] == fastest else f"{row['version']}"
        what = row["description"] + f" ({PRECISION_NAMES[row['precision']]})" * (row["precision"] != "fp32")
        lines.append(f"| {number} | {what} | {row['us']:,.1f} | {rate} | {row['of_roofline']:.0%} | {gain} |")
    if only:
        return lines
    for other in results.get("others", {}).get(op, []):
        if other["shape"] == shape:
            gain = f"{first / other['us']:.1f}x" if first else ""
            lines.append(f"| | {other['name']} | {other['us']:,.1f} | | | {gain} |")
    sizes = ", ".join(f"{name} = {size}" for name, size in shape.items())
    how = "L2 flushed between runs; medians; bold: the fastest"
    return [*lines, "", f"{results['card']}, {sizes}; {how}. [Raw numbers]({raw(results)})"]


def best_table(results: dict, op: str) -> list[str]:
    rows = rows_to_compare(results["rows"], op)
    lines = ["| shape | version 0, us | best of ours | us | TFLOP/s | against version 0 |", "|---|--:|--:|--:|--:|--:|"]
    for shape, here in by_shape(rows).items():
        zero, best = here.get(0), best_of(here)
        if best:
            number, us, against = of_best(best, zero)
            theirs, rate = f"{zero['us']:,.1f}" if zero else "", f"{best['tflops']:.1f}" if best["tflops"] else ""
            lines.append(f"| {shape} | {theirs} | {number} | {us} | {rate} | {against} |")
    return [*lines, "", f"{results['card']}. [Raw numbers]({raw(results)})"]


def fp32_table(results: dict, op: str) -> list[str]:
    theirs = rows_to_compare(results.get("rows in fp32", []), op)
    if not theirs:
        return [f"*Version 0 of {op} has not been measured in fp32 yet.*"]
    rows = rows_to_compare(results["rows"], op)
    arithmetic = by_shape([row for row in rows if row["precision"] == "fp32"] + theirs)
    threes = by_shape([row for row in rows if row["precision"] == "3xtf32"])
    lines = [
        "| shape | version 0, us | fp32 arithmetic | us | against version 0 | three of TF32 | us | TFLOP/s | against version 0 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for shape, here in arithmetic.items():
        zero, ours, three = here.get(0), best_of(here), best_of(threes.get(shape, {}))
        number, us, against = of_best(three, zero)
        rate = f"{three['tflops']:.1f}" if three else ""
        cells = [shape, f"{zero['us']:,.1f}" if zero else "", *of_best(ours, zero), number, us, rate, against]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"{results['card']}. [Raw numbers]({raw(results)})"]


def of_best(best: dict | None, zero: dict | None) -> list[str]:
    """Its number, its time, and how it stands to version 0: empty where it was not measured."""
    if not best:
        return ["", "", ""]
    return [str(best["version"]), f"{best['us']:,.1f}", f"{zero['us'] / best['us']:.0%}" if zero else ""]


def rows_to_compare(rows: list[dict], op: str) -> list[dict]:
    """Those of an op that were timed, and are no choice among others."""
    from kernels.op import load_all

    versions = load_all()[op].versions
    known = [row for row in rows if row["op"] == op and row["us"] and row["version"] in versions]
    return [row for row in known if not versions[row["version"]].chooses]


def by_shape(rows: list[dict]) -> dict[str, dict[int, dict]]:
    """A shape in words -> version -> row."""
    shapes: dict[str, dict[int, dict]] = {}
    for row in rows:
        sizes = ", ".join(f"{name}={size}" for name, size in row["shape"].items())
        shapes.setdefault(sizes, {})[row["version"]] = row
    return shapes


def best_of(here: dict[int, dict]) -> dict | None:
    """The fastest that is ours."""
    ours = [row for number, row in here.items() if number and row["right"] is not False]
    return min(ours, key=lambda row: row["us"], default=None)


def large_table(results: dict) -> list[str]:
    from kernels.op import load_all

    lines = ["| op | shape | version | us | GB/s | of the copy bandwidth |", "|---|---|--:|--:|--:|--:|"]
    for _, op in sorted(load_all().items()):  # what was imported first must not matter
        for shape in op.large:
            rows = [row for row in results["rows"] if row["op"] == op.name and row["shape"] == shape and row["us"]]
            if rows and not op.flops:
                best = min(rows, key=lambda row: row["us"])
                sizes = ", ".join(f"{name}={size}" for name, size in shape.items())
                rates = f"{best['us']:,.1f} | {best['gbps']:,.0f} | {best['of_roofline']:.0%}"
                lines.append(f"| {op.name} | {sizes} | {best['version']} | {rates} |")
    return [*lines, "", f"{results['card']}; medians. [Raw numbers]({raw(results)})"]


def steps_table(results: dict) -> list[str]:
    steps = {**(APART if "H200" in results["card"] else {}), **results.get("steps", {})}
    if not results.get("steps"):
        return ["*The training step has not been measured yet.*"]
    lines = ["| GPT-2 124M, B = 4, T = 1024 | ms a step | tokens a second |", "|---|--:|--:|"]
    for name, ms in sorted(steps.items(), key=lambda item: item[1]):
        bold = "**" if name == "llm.numba" else ""
        lines.append(f"| {bold}{name}{bold} | {bold}{ms:.2f}{bold} | {4096e3 / ms:,.0f} |")
    apart = [name for name in steps if name not in results["steps"]]
    note = f"Measured apart, on another card of the kind: {', '.join(apart)}. " if apart else ""
    packages = results["packages"]
    with_ = f"{results['card']}, numba-cuda {packages['numba-cuda']}, torch {packages['torch']}"
    said = f"{with_}; fp32 storage, TF32 products unless said. {note}[Raw numbers]({raw(results)})"
    return [*lines, "", said]


def without_table(results: dict) -> list[str]:
    found = {name: ms for name, ms in results.get("without", {}).items() if name != "commit"}
    if not found:
        return ["*The step without its ideas has not been measured yet.*"]
    lines = ["| the step | ms |", "|---|--:|"]
    return [*lines, *(f"| {name} | {ms:.1f} |" for name, ms in sorted(found.items(), key=lambda item: item[1]))]


def losses_table(results: dict) -> list[str]:
    if not results.get("losses"):
        return ["*The losses have not been compared yet.*"]
    lines = ["| products | steps | largest relative difference | last loss, ours | PyTorch's |", "|---|--:|--:|--:|--:|"]
    for name, found in results["losses"].items():
        last = f"{found['ours'][-1]:.4f} | {found['theirs'][-1]:.4f}"
        lines.append(f"| {name} | {len(found['ours'])} | {found['worst']:.1e} | {last} |")
    return lines


def batches_table(results: dict) -> list[str]:
    lines = ["| B | flags | ms a step | tokens a second | activations, MiB | all, MiB |", "|--:|---|--:|--:|--:|--:|"]
    for row in results.get("trainer", {}).get("batches", []):
        speed = f"{row['ms']:.1f} | {1024e3 * row['B'] / row['ms']:,.0f}"
        flags = f"-b {row['B']}" + " -r 1" * row["recompute"]
        lines.append(f"| {row['B']} | `{flags}` | {speed} | {row['activations MiB']:,} | {row['all MiB']:,} |")
    return lines if lines[2:] else ["*The batch sizes have not been measured yet.*"]


def cpu_table(results: dict) -> list[str]:
    if not (BENCHMARKS / "CPU.json").exists():
        return ["*The step on a processor has not been measured yet.*"]
    found = read_json(BENCHMARKS / "CPU.json", "`python kernels/bench.py --cpu` writes it")
    lines = ["| GPT-2 124M, B = 4 | ours, s a step | PyTorch's | our peak memory, MiB |", "|---|--:|--:|--:|"]
    lines += [f"| T = {row['T']} | {row['ours']:.2f} | {row['PyTorch']:.2f} | {row['peak MiB']:,} |" for row in found["steps"]]
    packages = found["packages"]
    said = f"{found['cpu']}, {found['cores']} cores; numba {packages['numba']}, torch {packages['torch']}, by turns in one process."
    said += " The machine had other work as well." * found.get("busy", False)
    return [*lines, "", f"{said} [Raw numbers]({results['prefix']}benchmarks/CPU.json)"]


def _measured(value: float | None, unit: str) -> str:
    return "not measured" if value is None else f"{value:.1f} {unit}"


def starts_table(results: dict) -> list[str]:
    found = results.get("trainer")
    if not found:
        return ["*Starts have not been measured yet.*"]
    same = "all the same" if found["same epoch"] else "**not the same**"
    return [
        "| | |",
        "|---|--:|",
        f"| from the command to the end of the first step, nothing compiled | {_measured(found['starts'].get('cold'), 's')} |",
        f"| the same, everything compiled | {_measured(found['starts'].get('warm'), 's')} |",
        f"| a step beyond its graph: the host's share | {_measured(found.get('host ms'), 'ms')} |",
        f"| losses of an epoch of {found['steps of an epoch']} steps, run twice | {same} |",
    ]


def profile_table(results: dict) -> list[str]:
    rows = results.get("profile")
    if not rows:
        return ["*The step has not been profiled yet.*"]
    whole = sum(row["ms"] for row in rows)
    lines = ["| op | version | calls | ms | share | us a call | GB/s | TFLOP/s |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        tflops = f"{row['flops'] / row['ms'] / 1e9:.0f}" if row["flops"] else ""
        rates = f"{row['nbytes'] / row['ms'] / 1e6:,.0f} | {tflops}"
        share, each = f"{row['ms'] / whole:.1%}", f"{1e3 * row['ms'] / row['calls']:.1f}"
        lines.append(f"| {row['op']} | {row['version']} | {row['calls']} | {row['ms']:.3f} | {share} | {each} | {rates} |")
    return [*lines, f"| all | | {sum(row['calls'] for row in rows)} | {whole:.3f} | | | | |"]


def card_table(results: dict) -> list[str]:
    r, packages = results["roofline"], results["packages"]
    versions = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
    lines = ["| measured with | |", "|---|---|", f"| card | {results['card']}, driver {results['driver']} |"]
    lines += [f"| packages | {versions} |"]
    lines += [f"| copy bandwidth | {r['bandwidth'] / 1e12:.2f} TB/s, read and written |"]
    lines += [f"| fp32 multiply-adds | {r['fp32'] / 1e12:.1f} TFLOP/s |", f"| TF32, 8192 cubed | {r['tf32'] / 1e12:.0f} TFLOP/s |"]
    commits = sorted({row["commit"] for row in results["rows"] if row.get("commit")} or {results.get("commit", "")})
    return [*lines, f"| commits of the code | {', '.join(commits)} |"]


def shape_of(op: str) -> dict:
    from kernels.op import load_all

    return load_all()[op].shape


def raw(results: dict) -> str:
    return f"{results['prefix']}benchmarks/{results['file']}"


def fill(page: Path, results: dict) -> str:
    """The page's text with its tables filled in."""
    from kernels.op import load_all

    results = {**results, "prefix": "" if page.parent == ROOT / "doc" else "doc/"}

    def table(match: re.Match) -> str:
        what = match["what"].split()
        whole = {
            "large": large_table, "steps": steps_table, "without": without_table, "profile": profile_table,
            "losses": losses_table, "card": card_table, "batches": batches_table, "starts": starts_table, "cpu": cpu_table,
        }  # fmt: skip
        if not what or what[0] not in {*whole, *load_all()}:
            raise DataError(f"{page.name}: `{match[1].strip()}` names no table: doc/fill_tables.py begins with those there are")
        if what[0] in whole:
            lines = whole[what[0]](results)
        elif what[1:] in (["best"], ["fp32"]):
            lines = {"best": best_table, "fp32": fp32_table}[what[1]](results, what[0])
        else:
            lines = ladder_table(results, what[0], {int(number) for number in what[1:]})
        return match[1] + "\n".join(lines) + "\n" + match[4]

    return MARKER.sub(table, page.read_text())


def draw_plots(results: dict) -> None:
    from kernels.plot import plot_ladder

    for op in dict.fromkeys(row["op"] for row in results["rows"]):
        rows = [SimpleNamespace(**row) for row in results["rows"] if row["op"] == op and row["shape"] == shape_of(op)]
        if any(row.us for row in rows):
            plot_ladder(rows, BENCHMARKS / f"{op}.svg")


def measured() -> dict:
    """What the tables are made from: the results of the H200, or of the first card that there is."""
    files = [file for file in BENCHMARKS.glob("*.json") if file.name != "CPU.json"]
    if not files:
        sys.exit("doc/benchmarks has no .json yet: `make bench` on a GPU writes one")
    file = min(files, key=lambda file: ("H200" not in file.name, file.name))
    return {**read_json(file, "`make bench` on a GPU writes it"), "file": file.name}


def main() -> None:
    parser = Arguments(description="Fills the measured tables of README.md and doc/*.md.")
    parser.add_argument("--check", action="store_true", help="write no page, and exit with 1 where one would change")
    parser.add_argument("--plots", action="store_true", help="draw doc/benchmarks/<op>.svg as well")
    asked = parser.parse_args()
    results = measured()
    pages = [ROOT / "README.md", *sorted((ROOT / "doc").glob("*.md"))]
    try:
        filled = {page: fill(page, results) for page in pages}  # all of them, before the first is written
    except KeyError as error:
        raise DataError(f"{results['file']} lacks {error}, which a table needs: `make bench` on a GPU writes it") from None
    stale = [page.name for page in pages if filled[page] != page.read_text()]
    for page in pages:
        if page.name in stale and not asked.check:
            write_text(page, filled[page])
    if asked.plots:
        draw_plots(results)
    print(f"tables of {len(stale)} pages {'are stale' if asked.check else 'filled'}: {', '.join(stale) or 'none'}")
    sys.exit(asked.check and bool(stale))


if __name__ == "__main__":
    run_script(main)
