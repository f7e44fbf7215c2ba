"""What is the fastest at a shape is found out once, and stands."""

from pathlib import Path

import pytest

from kernels import choices
from kernels.choices import Choices
from kernels.device import ShapeError

KEY = (4096, 768)


@pytest.fixture
def seconds(monkeypatch):
    """What the candidates take, None for one that refuses; and what runs them."""
    times = [3.0, 1.0, 2.0]

    def take(run):
        run(stream=0)
        return times[take.index]

    def run(index, stream):
        take.index = index
        if times[index] is None:
            raise ShapeError("needs another shape")

    monkeypatch.setattr(choices, "_time", take)
    monkeypatch.setattr(choices, "_is_captured", lambda stream: stream == "captured")
    return times, run


def test_the_fastest_is_chosen(tmp_path, seconds):
    times, run = seconds
    assert Choices(tmp_path, "products").index(KEY, run, 3, 0) == 1


def test_another_process_makes_the_same_choice_whatever_it_would_measure(tmp_path, seconds):
    times, run = seconds
    Choices(tmp_path, "products").index(KEY, run, 3, 0)
    times[0] = 0.5
    assert Choices(tmp_path, "products").index(KEY, run, 3, 0) == 1
    assert Choices(tmp_path, "products").index((1, 1), run, 3, 0) == 0
    assert Choices(tmp_path, "others").index(KEY, run, 3, 0) == 0


def test_of_two_processes_at_once_the_first_to_write_has_chosen_for_both(tmp_path, seconds):
    times, run = seconds
    first, second = Choices(tmp_path, "products"), Choices(tmp_path, "products")
    assert first.index(KEY, run, 3, 0) == 1
    times[0] = 0.5
    assert second.index((1, 1), run, 3, 0) == 0
    assert second.index(KEY, run, 3, 0) == 1
    assert Choices(tmp_path, "products").known == {repr(KEY): 1, "(1, 1)": 0}


def test_a_candidate_that_refuses_is_not_chosen(tmp_path, seconds):
    times, run = seconds
    times[1] = None
    assert Choices(tmp_path, "products").index(KEY, run, 3, 0) == 2


def test_what_must_not_run_now_gets_the_first_and_is_found_out_later(tmp_path, seconds):
    times, run = seconds
    products = Choices(tmp_path, "products")
    assert products.index(KEY, run, 3, "captured") == products.index(KEY, run, 3, 0, may_run=False) == 0
    assert products.index(KEY, run, 3, 0) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", "\xff", "[" * 99999, '{"(4096, 768)": "1"}', '{"(4096, 768)": 3}'])
def test_a_file_that_cannot_be_read_or_holds_no_choice_is_written_anew(tmp_path, seconds, content):
    times, run = seconds
    products = Choices(tmp_path, "products")
    products.file.write_text(content, encoding="latin-1")
    assert Choices(tmp_path, "products").index(KEY, run, 3, 0) == 1
    assert Choices(tmp_path, "products").known == {repr(KEY): 1}


def test_where_it_cannot_be_kept_the_choice_is_made_all_the_same(tmp_path, seconds):
    times, run = seconds
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        products = Choices(Path(folder), "products")
        assert products.index(KEY, run, 3, 0) == products.index(KEY, run, 3, 0) == 1
    products = Choices(tmp_path, "products")
    products.file.mkdir()
    assert products.index(KEY, run, 3, 0) == 1
