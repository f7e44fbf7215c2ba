"""The docs are true: every Python block runs, every link leads to a file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "doc").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The page's Python blocks: the line that each begins at, and its code."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        indent, language, code = fence.groups()
        if language == "python":
            line = text.count("\n", 0, fence.start(3)) + 1
            found.append((line, re.sub(f"^{indent}", "", code, flags=re.M)))
    return found


def standing_where_it_stands(page: Path) -> str:
    """The blocks as one program whose line numbers are the page's own, so that a traceback leads to the page."""
    lines: list[str] = []
    for line, code in blocks(page):
        lines += [""] * (line - 1 - len(lines)) + code.splitlines()
    return "\n".join(lines) + "\n"


@each_page
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path):
    if not blocks(page):
        pytest.skip(f"{page.name} has no Python block")
    program = tmp_path / f"{page.stem}_page.py"
    program.write_text(standing_where_it_stands(page))
    environment = {**os.environ, "LLM_NUMBA_TARGET": "simulator", "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


@each_page
def test_the_links_of_a_page_lead_somewhere(page):
    prose = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_help_of_the_tables_filler_fills_nothing():
    done = subprocess.run([sys.executable, ROOT / "doc" / "fill_tables.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: fill_tables.py [-h] [--check] [--plots]\n")
