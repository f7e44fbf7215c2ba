"""Tiny Shakespeare, 1.1 MB of his plays (collected by Andrej Karpathy for char-rnn), as GPT-2 tokens.

    python data/tinyshakespeare.py                 downloads the text to data/tiny_shakespeare.txt
    python data/tinyshakespeare.py --text FILE     takes it from a file

writes data/tiny_shakespeare_train.bin and _val.bin: 305,260 and 32,768 tokens.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # a script's own folder is there: the repo's root should be
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all else is imported: no traceback

from data import corpus
from data.download import download, positive_seconds
from data.files import Arguments, DataError, is_one_of, run_script, shown

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TEXT_FILE = corpus.TINY_SHAKESPEARE.with_suffix(".txt")
VAL_TOKENS = 32768


def fetch(limit: float, quiet: bool = False) -> None:
    """Downloads the text to TEXT_FILE, in at most limit seconds. Raises DataError."""
    download(URL, TEXT_FILE, limit=limit, sha256=SHA256, quiet=quiet, instead="give the text with --text FILE")


def sections(text: str) -> list[str]:
    """Returns the text cut after every blank line: the speeches, each a document to the model."""
    *heads, last = text.split("\n\n")
    return [head + "\n\n" for head in heads] + [last]


def prepare_text(path: str | Path, prefix: str | Path) -> tuple[int, int]:
    """Writes the two token files of a text. Returns how many tokens they hold. Raises DataError."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): give the text with --text FILE") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start:,}): convert it first") from None
    return corpus.prepare(sections(text), prefix, VAL_TOKENS)


def main() -> None:
    parser = Arguments(description="Writes tiny Shakespeare as GPT-2 tokens, for train_gpt2_fp32.py -i PREFIX.")
    parser.add_argument("--text", metavar="FILE", help="take the text from a file, download nothing")
    parser.add_argument("--prefix", default=corpus.TINY_SHAKESPEARE, help="of the files to write (%(default)s)")
    parser.add_argument("--time-limit", type=positive_seconds, default=120, metavar="S", help="of the download (120 s)")
    args = parser.parse_args()
    if args.text is None:
        fetch(args.time_limit)
    text, files = TEXT_FILE if args.text is None else args.text, corpus.token_files(args.prefix)
    if is_one_of(text, files):
        parser.error(f"--prefix {args.prefix} would write over the --text that it reads: name another")
    counts = prepare_text(text, args.prefix)
    for path, count in zip(files, counts, strict=True):
        print(f"{shown(path)}: {count:,} tokens")


if __name__ == "__main__":
    run_script(main)
