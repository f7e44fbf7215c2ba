"""run.py, the picker and the docs' tables: what a learner types, and what they are told."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cpu_reference
import kernels.op
from data.checkpoint import GPT2Config
from data.files import DataError
from kernels import harness, ladder, pick, profile
from kernels.device import TARGET
from kernels.ladder import Row
from kernels.op import OPS, Picked, load_all, of_layer
from kernels.profile import work
from kernels.unfused import Unfused
from model import GPT2

ROOT = Path(__file__).parent.parent
without_a_gpu = pytest.mark.skipif(TARGET == "gpu", reason="there is a GPU")
simulator_only = pytest.mark.skipif(TARGET != "simulator", reason="run with LLM_NUMBA_TARGET=simulator")


def run(capsys, *words: str, layer: str = "gelu") -> tuple[int, str, str]:
    """Exit code, output and errors of `python kernels/<layer>/run.py WORDS`."""
    try:
        harness.main(layer, list(words))
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        for op in OPS.values():
            op.versions.pop(harness.YOURS, None)
    return code, *capsys.readouterr()


def test_every_layer_has_its_run_py():
    layers = {op.layer for op in load_all().values()}
    assert {file.parent.name for file in (ROOT / "kernels").glob("*/run.py")} == layers
    for layer in layers:
        assert f'main("{layer}")' in (ROOT / "kernels" / layer / "run.py").read_text()


def test_ctrl_c_at_the_start_of_a_script_is_no_traceback_of_an_import():
    for file in [*(ROOT / "kernels").glob("*/run.py"), ROOT / "kernels" / "pick.py", ROOT / "kernels" / "bench.py"]:
        before = file.read_text().partition("signal.signal(signal.SIGINT, signal.SIG_DFL)")[0]
        assert not re.search(r"^ *(import numpy|from (data|kernels)\b)", before, re.M), file


@simulator_only
def test_a_version_is_checked_and_the_simulator_is_named(capsys):
    code, output, errors = run(capsys, "--version", "1", "--pass", "forward")
    assert (code, errors) == (0, "")
    assert "simulator" in output and re.search(r"out \d\.\de-\d\d", output)


@simulator_only
def test_shape_flags_change_the_shape(capsys):
    code, output, _ = run(capsys, "--version", "1", "--pass", "forward", "-N", "3", "-C", "7", layer="layernorm")
    assert code == 0 and "N = 3, C = 7" in output
    _, output, _ = run(capsys, "--version", "1", "--pass", "forward", "-B", "2", "-T", "3", "-C", "5", layer="layernorm")
    assert "N = 6, C = 5" in output


def test_list_names_every_version(capsys):
    code, output, _ = run(capsys, "--list", layer="layernorm")
    assert code == 0
    for op in of_layer("layernorm"):
        assert op.name in output
        assert all(str(number) in output for number in op.versions)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--version", "98"], "gelu_forward has no version 98; it has 1, 2"),
        (["--version", "two"], "--version two: use a number, or all"),
        (["-N", "0"], "-N 0: a size is 1 or more"),
        (["-N", "many"], "invalid int value: 'many'"),
        (["-N", "99999999999999"], "(99999999999999,) and data type float32 (-N 99999999999999)"),
        (["--block-size", "2048"], "--block-size 2048: a block has 1 to 1024 threads"),
        (["--pass", "sideways"], "invalid choice: 'sideways'"),
        (["--file", "nowhere.py"], "nowhere.py: no such file; --template nowhere.py writes one to start from"),
        (["--file", "no\nwhere.py"], "no\\nwhere.py: no such file"),
        (["--json", ""], "--json: name a file"),
        (["--plot", "ladder.docx"], "--plot ladder.docx: name a .svg or a .png file"),
        pytest.param(["--plot", "ladder.svg"], "--plot ladder.svg: it draws times, and those take a GPU", marks=without_a_gpu),
        (["--version", "²"], "--version ²: use a number, or all"),
        (["--seed", "-1"], "--seed -1: a seed is 0 or more"),
        (["--template", "no/folder.py"], "--template no/folder.py: it cannot be written (No such file or directory)"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--file", "kernels"], "kernels: no file of text"),
        (["--list", "--json", "x.json"], "--list runs nothing and writes nothing: leave the other out"),
        (["--file", __file__, "--json", __file__], "it is the --file that this run reads: name another file"),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_in_one_line(capsys, words, told):
    code, _, errors = run(capsys, *words)
    assert code == 1
    assert told in errors.splitlines()[-1] and "Traceback" not in errors
    assert len(errors.splitlines()) <= 2  # argparse's own begin with how to ask for help


@simulator_only
@pytest.mark.parametrize("where", ["launcher", "kernel"])
def test_a_file_that_exits_as_it_is_launched_is_no_success(capsys, tmp_path, where):
    file = tmp_path / "mine.py"
    kernel = "@cuda.jit\ndef kernel(out):\n    sys.exit(0)\n" if where == "kernel" else ""
    launcher = f"def gelu_forward(out, inp, *, stream=0):\n    {'kernel[1, 1](out)' if kernel else 'sys.exit(0)'}\n"
    file.write_text(f"import sys\nfrom kernels.device import cuda\n{kernel}{launcher}")
    code, _, errors = run(capsys, "--pass", "forward", "--version", "1", "--file", str(file))
    assert (code, errors) == (1, f"error: {file} exits as it is launched: a launcher returns, a kernel too\n")


@simulator_only
def test_what_a_version_refuses_in_is_printed_as_it_stands(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from kernels.device import need\ndef gelu_forward(out, inp, *, stream=0): need(False, 'needs [out] and [/i]')")
    code, output, _ = run(capsys, "--pass", "forward", "--version", "1", "--file", str(file))
    assert code == 0 and "needs [out] and [/i]" in output, "the other version was right"


@simulator_only
def test_a_switch_takes_zero_or_one(capsys):
    words = "--pass", "forward", "--version", "1", "-zipf"
    assert run(capsys, *words, "0", layer="encoder")[0] == 0
    assert run(capsys, *words, "2", layer="encoder")[2] == "error: -zipf 2: it takes 0 or 1\n"


@simulator_only
def test_where_the_one_version_asked_for_refuses_the_run_has_failed(capsys):
    code, output, _ = run(capsys, "--pass", "forward", "--version", "3", "--block-size", "48", layer="layernorm")
    assert code == 1 and "needs a block size that is a multiple of 32, got 48" in output


def test_a_block_size_is_refused_by_the_one_version_that_chooses_its_own(capsys, tmp_path):
    words = "--pass", "forward", "--block-size", "64", "--version"
    code, output, errors = run(capsys, *words, "2", layer="crossentropy")
    assert (code, output, errors) == (1, "", "error: --block-size: crossentropy_forward 2 chooses its own\n")
    file = tmp_path / "mine.py"
    file.write_text("def gelu_forward(out, inp, *, stream=0): ...")
    _, output, errors = run(capsys, *words, "1", "--file", str(file))
    assert (output, errors) == ("", f"error: --block-size: {file} chooses its own\n")


@simulator_only
def test_a_block_size_for_all_versions_leaves_their_numbers_in_the_table(capsys):
    code, output, errors = run(capsys, "--pass", "forward", "--block-size", "64", layer="crossentropy")
    assert (code, errors) == (0, "")
    assert re.findall(r"^│ +(\d) │", output, re.M) == ["1", "2"] and "┃ version ┃" in output


@without_a_gpu
def test_a_plot_that_is_refused_says_that_the_json_is_not_written(capsys, tmp_path):
    code, _, errors = run(capsys, "--plot", "ladder.svg", "--json", str(tmp_path / "x.json"))
    assert code == 1 and errors.endswith(f"leave it out (nothing was run, and {tmp_path}/x.json is not written)\n")


@simulator_only
def test_a_template_is_a_right_version_of_its_own(capsys, tmp_path):
    file = str(tmp_path / "mine.py")
    assert run(capsys, "--template", file, "--pass", "layernorm_forward", layer="layernorm")[0] == 0
    code, output, _ = run(capsys, "--file", file, "--pass", "layernorm_forward", "--version", "1", layer="layernorm")
    assert code == 0 and "yours" in output and "mine.py" in output
    code, _, errors = run(capsys, "--template", file, layer="layernorm")
    assert code == 1 and "is there already" in errors


@simulator_only
def test_a_wrong_kernel_of_ones_own_is_called_wrong(capsys, tmp_path):
    file = tmp_path / "mine.py"
    run(capsys, "--template", str(file), "--pass", "forward")
    source = file.read_text()
    assert "out[i] = gelu_tanh(inp[i])" in source
    file.write_text(source.replace("out[i] = gelu_tanh(inp[i])", "out[i] = inp[i]"))
    code, output, _ = run(capsys, "--file", str(file), "--pass", "forward", "--version", "1")
    assert code == 1 and "WRONG" in output
    file.write_text(source.replace("out[i] = gelu_tanh(inp[i])", "out[i + 1] = gelu_tanh(inp[i])"))
    code, _, errors = run(capsys, "--file", str(file), "--pass", "forward", "--version", "1")
    assert code == 1 and "out of bounds" in errors and "mine.py" in errors and len(errors.strip().splitlines()) == 1


def test_a_file_without_the_function_is_told_its_name(capsys, tmp_path):
    file = tmp_path / "empty.py"
    file.write_text("x = 1\n")
    code, _, errors = run(capsys, "--file", str(file), "--pass", "forward")
    assert code == 1 and "has no function gelu_forward(out, inp)" in errors


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def gelu_forward(out): ...", "mine.py: gelu_forward is called with (out, inp): too many positional arguments"),
        ("x = 1\nraise ValueError('no')", "mine.py:2: no"),
        ("x = 1\nraise SystemExit", "mine.py exits as it is loaded: put what does that under"),
        ("def gelu_forward(", "mine.py:1: '(' was never closed"),
        ("x = 1\0", "mine.py:1: source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_fails_is_named_with_the_line(capsys, tmp_path, source, told):
    file = tmp_path / "mine.py"
    file.write_text(source)
    code, _, errors = run(capsys, "--file", str(file), "--pass", "forward")
    assert code == 1 and told in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\nnothing", "forward.py:2: name 'nothing' is not defined"),
        ("again = op.version(1, '')(print)", "forward.py:1: gelu_forward has a version 1 already: gelu_forward1"),
    ],
)
def test_a_layers_file_that_fails_is_named_with_the_line(capsys, tmp_path, monkeypatch, source, told):
    code = compile(source, tmp_path / "forward.py", "exec")
    names = {"__name__": "kernels.gelu.forward", "op": load_all()["gelu_forward"]}
    monkeypatch.setattr(kernels.op, "of_layer", lambda layer: exec(code, names))
    code, _, errors = run(capsys)
    assert (code, errors) == (1, f"error: {tmp_path}/{told}\n")


@simulator_only
@pytest.mark.parametrize("name", ["numpy.py", "mine.txt"])
def test_a_file_may_have_any_name(capsys, tmp_path, name):
    file = str(tmp_path / name)
    run(capsys, "--template", file, "--pass", "forward")
    code, output, _ = run(capsys, "--file", file, "--pass", "forward", "--version", "1")
    assert code == 0 and name in output


def test_ctrl_c_ends_it_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own
    monkeypatch.setattr(os, "_exit", sys.exit)  # and goes on
    (tmp_path / "mine.py").write_text("raise KeyboardInterrupt")
    code, _, errors = run(capsys, "--file", str(tmp_path / "mine.py"), "--pass", "forward")
    assert (code, errors) == (130, "\nstopped by Ctrl-C\n")


@simulator_only
def test_a_result_that_cannot_be_kept_is_said_after_the_table(capsys, tmp_path):
    code, output, errors = run(capsys, "--pass", "forward", "--version", "1", "--json", str(tmp_path))
    assert code == 1 and "a thread an element" in output
    assert f"--json {tmp_path}: it cannot be written (it is no regular file): name another file" in errors


def write_bench(file):
    from kernels import bench

    bench.write(file, {"rows": []})


WRITERS = {
    "run.py --json": lambda file: ladder.write_json(file, []),
    "run.py --template": lambda file: harness.write_template(load_all()["gelu_forward"], file),
    "pick.py": lambda file: pick.write_picks({"default": {"gelu_forward": 2}}),
    "bench.py": write_bench,
}


@pytest.mark.parametrize("who", WRITERS)
def test_a_kill_at_any_time_leaves_the_old_file_or_the_new_one(who, tmp_path, monkeypatch):
    file, seen = tmp_path / "kept", []
    monkeypatch.setattr(pick, "FILE", file)
    if who != "run.py --template":  # that one refuses a file that is there
        file.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(file.exists() and file.read_text()))  # all is written, elsewhere
    WRITERS[who](file)
    assert seen == ["old" if who != "run.py --template" else False]
    assert len(file.read_text()) > 10 and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("kept", [None, "", "[]", '{"bandwidth": 1'])
def test_a_roofline_that_is_not_whole_is_measured_anew_and_kept_where_it_can_be(kept, tmp_path, monkeypatch):
    for name in ("measure_bandwidth", "measure_fp32", "_measure_tf32"):
        monkeypatch.setattr(ladder, name, lambda: 2.0)
    monkeypatch.setattr(ladder, "card", lambda: {"card": "a card"})
    monkeypatch.setattr(ladder, "CACHE_FOLDER", tmp_path if kept is not None else tmp_path / "none")
    if kept is not None:
        (tmp_path / "roofline-a-card.json").write_text(kept)
    monkeypatch.setattr(ladder, "_roofline", {})
    assert ladder.roofline() == {"bandwidth": 2.0, "fp32": 2.0, "tf32": 2.0}
    assert kept is None or json.loads((tmp_path / "roofline-a-card.json").read_text()) == ladder.roofline()


@simulator_only
def test_json_keeps_errors_and_versions_of_packages(capsys, tmp_path):
    file = tmp_path / "gelu.json"
    run(capsys, "--pass", "forward", "--json", str(file))
    kept = json.loads(file.read_text())
    assert kept["packages"]["numba"] and kept["card"] == "simulator"
    assert [row["version"] for row in kept["rows"]] == list(OPS["gelu_forward"].versions)
    assert all(row["right"] and row["errors"]["out"] < 1e-5 for row in kept["rows"])


def test_numbas_error_is_cut_to_the_line_that_matters():
    message = """Failed in cuda mode pipeline (step: nopython frontend)
Untyped global name 'flot32': Cannot determine Numba type of <class 'x'>

File "mine.py", line 19:
def kernel(out, inp):
    m = flot32(0)
    ^
"""
    line = harness.in_one_line(TypeError(message))
    assert line.startswith("mine.py:19: Untyped global name 'flot32'") and "\n" not in line


def test_what_fails_below_numbas_cache_names_its_folder(monkeypatch):
    """A file of compiled code that is damaged inside is found out deep in LLVM."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/folder")
    deep = {}
    exec("def fail(depth): fail(depth - 1) if depth else int('bitcode')", deep)
    cache = {"__name__": "numba.core.caching", "fail": deep["fail"]}
    exec("def load(): fail(9)", cache)
    with pytest.raises(ValueError) as error:
        cache["load"]()
    assert harness.in_one_line(error.value).startswith("/folder has a damaged file of compiled code (invalid literal")


def test_a_repeatable_version_is_picked_unless_it_costs_more_than_five_percent_and_fifty_microseconds():
    assert pick.choose({1: 10.0, 2: 5.0, 3: 7.0}, repeatable={1, 2, 3}) == 2
    assert pick.choose({1: 900.0, 2: 5.0, 3: 54.0}, repeatable={1, 3}) == 3
    assert pick.choose({1: 9000.0, 2: 5000.0, 3: 5200.0}, repeatable={1, 3}) == 3
    assert pick.choose({1: 9000.0, 2: 5000.0, 3: 5300.0}, repeatable={1, 3}) == 2
    assert pick.choose({1: 9.0, 2: 5.0}, repeatable=set()) == 2


def test_what_is_wrong_or_refuses_or_was_not_timed_at_one_shape_of_the_trainer_is_not_picked():
    op = load_all()["gelu_forward"]
    row = lambda version, N, us, right=True: Row(op.name, version, "", {"N": N}, us=us, right=right)  # noqa: E731
    assert pick.pick_from(op, [row(1, 4, 9.0), row(2, 4, 5.0), row(1, 8, 9.0), row(2, 8, 5.0)]) == 2
    assert pick.pick_from(op, [row(1, 4, 9.0), row(2, 4, 5.0), row(1, 8, 9.0), row(2, 8, 5.0, right=False)]) == 1
    assert pick.pick_from(op, [row(1, 4, 9.0), row(2, 4, 5.0), row(1, 8, 9.0), row(2, 8, None)]) == 1
    assert pick.pick_from(op, [row(1, 4, 9.0), row(2, 4, 5.0), row(1, 8, 9.0)]) == 1
    assert pick.pick_from(op, [row(1, 4, None)]) is None


def test_the_time_of_a_step_decides_between_versions_that_are_nearly_as_fast(monkeypatch):
    import model
    from kernels import timing

    tried = []

    class Model:
        def __init__(self, config, parameters, device, report, kernels):
            ((_, number),) = kernels.items()
            tried.append(number)
            self.backend = SimpleNamespace(picked=SimpleNamespace(called=lambda: {"gelu_forward", "adamw_update"}))

        def train_step(self, inputs, targets, learning_rate, step):
            assert inputs.shape == targets.shape == (4, 1024) and step in (1, 2)

        def close(self): ...

    def median_ms(step, steps):
        step(), step()
        return {2: 15.0, 3: 14.0}[tried[-1]]

    monkeypatch.setattr(model, "GPT2", Model)
    monkeypatch.setattr(model, "random_parameters", lambda config, seed: None)
    monkeypatch.setattr(timing, "median_ms", median_ms)
    op = load_all()["gelu_forward"]
    rows = [Row(op.name, version, "", {"N": 4}, us=us, right=True) for version, us in ((1, 90.0), (2, 50.0), (3, 52.0))]
    assert pick.pick_from(op, rows, in_step=True) == 3 and tried == [2, 3]
    assert pick.pick_from(op, rows[:2], in_step=True) == 2 and tried == [2, 3], "one version needs no step"
    assert pick.pick_from(load_all()["gelu_backward"], rows, in_step=True) == 2, "a step that does not call it tells nothing"


@pytest.mark.parametrize(
    "name", ["gelu_backward", "adamw_update", "layernorm_backward", "matmul_backward_weight", "attention_forward"]
)
def test_a_profile_counts_the_bytes_and_flops_that_the_ladder_counts(name):
    op = load_all()[name]
    arguments = op.make_arguments(np.random.default_rng(1), **op.small)
    nbytes, flops = work(op, tuple(arguments.values()))
    assert abs(nbytes / op.bytes_moved(**op.small) - 1) < 1e-3  # AdamW's three numbers beside its arrays
    assert flops == (op.flops(**op.small) if op.flops else 0)


def test_a_profile_counts_the_rows_of_the_token_table_that_are_read():
    op = load_all()["encoder_forward"]
    arguments = op.make_arguments(np.random.default_rng(1), B=1, T=4, C=8, V=1000, zipf=1)
    assert work(op, tuple(arguments.values()))[0] <= 4 * (3 * 4 * 8 + 4)


@simulator_only
@pytest.mark.parametrize("fused", [True, False])
def test_a_profile_names_every_op_of_a_step_fused_or_not(fused, monkeypatch, capsys):
    """On the CPU's model and functions; what only a GPU has stands in as something that takes no time."""
    ops = load_all()

    class Event:
        def record(self, stream): ...

    class Picked:
        stream = SimpleNamespace(synchronize=lambda: None)

        def __getattr__(self, name):
            def launch(*args):
                getattr(cpu_reference, name)(*args)
                return ops[name].versions[max(ops[name].versions)]

            return launch

    monkeypatch.setattr(profile.Profiled, "hold", lambda self: None)
    monkeypatch.setattr(profile, "cuda", SimpleNamespace(event=Event, event_elapsed_time=lambda start, end: 1.0))
    config = GPT2Config(max_seq_len=8, vocab_size=30, padded_vocab_size=32, num_layers=2, num_heads=2, channels=16)
    model = GPT2.random(config, report=lambda line: None)
    model.backend.picked, model.backend.graph, model.backend.in_order = Picked(), True, nullcontext
    model.ops = model.backend.picked if fused else Unfused(model.backend.picked)
    before, tokens = model.ops, np.zeros((1, 8), np.int32)
    profile.print_profile(profile.profile_step(model, tokens, tokens, 1e-3, 1))
    named = set(re.findall(r"^│ (\w+) ", capsys.readouterr().out, re.M))
    assert model.ops is before and model.backend.graph is True
    assert named >= {"adamw_update", "attention_backward", "matmul_backward_weight", "fused_classifier"}
    for op in ("fused_residual_forward", "fused_residual_backward", "matmul_gelu_forward", "matmul_gelu_backward_input"):
        assert (op in named) == fused, op
    assert ({"residual_forward", "gelu_forward", "gelu_backward"} <= named) != fused


def test_picks_are_kept_by_card(tmp_path, monkeypatch):
    monkeypatch.setattr(pick, "FILE", tmp_path / "picked.toml")
    assert pick.read_picks() == {}
    pick.write_picks({"default": {"gelu_forward": 2}, "NVIDIA H200": {"gelu_forward": 3}})
    assert pick.read_picks() == {"default": {"gelu_forward": 2}, "NVIDIA H200": {"gelu_forward": 3}}


def test_picks_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pick, "FILE", tmp_path / "picked.toml")
    for text in ("[default", "default = 3", "[default]\ngelu_forward = 'x'", "[default]\ngelu_forward = -1"):
        pick.FILE.write_text(text)
        with pytest.raises(DataError, match=r"picked.toml cannot be read \(.*\): delete it, and kernels/pick.py writes it"):
            pick.read_picks()


def test_the_picks_that_ship_exist():
    ops, tables = load_all(), pick.read_picks()
    assert tables["default"].keys() <= ops.keys()
    for picks in tables.values():
        assert all(number in ops[name].versions for name, number in picks.items())


@simulator_only
def test_a_version_that_refuses_a_shape_gives_way_to_the_next():
    import numpy as np

    op = load_all()["encoder_forward"]
    refuses = max(op.versions)
    arguments = op.make_arguments(np.random.default_rng(0), **{**op.small, "C": 3})
    took = Picked({"encoder_forward": refuses}).encoder_forward(*arguments.values())
    assert took.number != refuses
    assert np.isfinite(arguments["out"]).all()


def test_the_tables_of_the_docs_are_those_of_the_committed_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "doc"))
    import fill_tables

    results = fill_tables.measured()
    for page in [ROOT / "README.md", *(ROOT / "doc").glob("*.md")]:
        assert fill_tables.fill(page, results) == page.read_text(), f"{page.name}: run `make doc-tables`"
    assert "fill_tables" in sys.modules


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", '{"card": "x"}'])
def test_numbers_that_are_no_numbers_are_named_in_one_line_and_no_page_changes(monkeypatch, tmp_path, content):
    monkeypatch.syspath_prepend(str(ROOT / "doc"))
    import fill_tables

    (tmp_path / "card.json").write_text(content, encoding="latin-1")
    monkeypatch.setattr(fill_tables, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(fill_tables, "write_text", None)
    monkeypatch.setattr(sys, "argv", ["fill_tables.py"])
    with pytest.raises(DataError, match=r"card.json.*: `make bench` on a GPU writes it$"):
        fill_tables.main()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["kernels/pick.py", "--x"], "pick.py: unrecognized arguments: --x (--help shows the flags)"),
        (["kernels/bench.py", "--x"], "bench.py: unrecognized arguments: --x (--help shows the flags)"),
        (["kernels/bench.py", "--cpu", "-i", "none"], "error: none_train.bin is missing: run `python data/tiny"),
        (["doc/fill_tables.py", "--x"], "fill_tables.py: unrecognized arguments: --x (--help shows the flags)"),
        pytest.param(["kernels/pick.py"], "kernels/pick.py times kernels, so it needs a CUDA GPU", marks=without_a_gpu),
        pytest.param(["kernels/bench.py"], "kernels/bench.py measures a GPU, and there is none", marks=without_a_gpu),
    ],
)
def test_the_other_scripts_answer_in_one_line_too_and_need_no_installed_project(words, told):
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(told)


def test_a_table_in_fp32_sets_fp32_beside_fp32(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "doc"))
    import fill_tables

    def row(version, us, precision):
        about = {"op": "matmul_forward", "shape": {"N": 8}, "right": None, "tflops": 1.0}
        return about | {"version": version, "us": us, "precision": precision}

    rows = [row(0, 1, "tf32"), row(8, 5, "fp32"), row(10, 2, "tf32"), row(15, 2.5, "3xtf32"), row(16, 3, "3xtf32")]
    results = {"card": "card", "prefix": "", "file": "file", "rows": rows}
    assert "not been measured" in fill_tables.fp32_table(results, "matmul_forward")[0]
    results["rows in fp32"] = [row(0, 4, "fp32")]
    assert "| N=8 | 4.0 | 8 | 5.0 | 80% | 15 | 2.5 | 1.0 | 160% |" in fill_tables.fp32_table(results, "matmul_forward")
    results["rows"] = [row(8, 5, "fp32"), {**row(15, 2.5, "3xtf32"), "right": False}, row(99, 1, "fp32")]
    assert "| N=8 | 4.0 | 8 | 5.0 | 80% |  |  |  |  |" in fill_tables.fp32_table(results, "matmul_forward")
    results["rows"] = [row(0, 1, "tf32"), row(8, 5, "fp32"), row(10, 2, "tf32")]
    assert "| N=8 | 1.0 | 10 | 2.0 | 1.0 | 50% |" in fill_tables.best_table(results, "matmul_forward")


@pytest.mark.parametrize("home", ["/proc", "/dev/null"])
def test_without_a_home_that_can_be_written_compiled_code_goes_to_the_temporary_folder(home, tmp_path):
    code = "import kernels.target as target; print(target.CACHE_FOLDER)"
    environment = {"HOME": home, "TMPDIR": str(tmp_path), "LLM_NUMBA_TARGET": "simulator"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path))


def test_run_py_needs_no_installed_project(tmp_path):
    environment = {"HOME": str(tmp_path), "LLM_NUMBA_TARGET": "simulator"}
    words = [sys.executable, str(ROOT / "kernels" / "gelu" / "run.py"), "--list"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "gelu_forward(out, inp)" in done.stdout


def test_a_target_that_there_is_not_is_an_error_in_one_line():
    words = [sys.executable, "kernels/gelu/run.py"]
    environment = {**os.environ, "LLM_NUMBA_TARGET": "abacus"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: LLM_NUMBA_TARGET=abacus: use gpu, simulator or compile\n")


SCRIPTS = ["train_gpt2_fp32.py --help", "kernels/gelu/run.py --help", "kernels/gelu/run.py --list", "data/pydoc_corpus.py --help"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_for_the_output_is_one_line_and_a_reader_that_has_gone_none(script):
    words = [sys.executable, *script.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    told = "error: what is printed cannot be written (No space left on device): check where it goes\n"
    assert (done.returncode, done.stderr) == (1, told)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@simulator_only
def test_with_its_output_closed_the_result_is_kept_all_the_same(tmp_path):
    words = [sys.executable, "kernels/gelu/run.py", "--version", "1", "--json", str(tmp_path / "kept.json")]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "kept.json").exists()
