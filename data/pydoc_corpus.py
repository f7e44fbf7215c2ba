"""The help topics that come with Python itself (pydoc_data), as GPT-2 tokens: a text that needs no network.

    python data/pydoc_corpus.py

writes data/pydoc_topics_train.bin and _val.bin, about 118,000 and 20,480 tokens: they differ a little between the
versions of Python, and are the same every time for one of them.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # a script's own folder is there: the repo's root should be
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all else is imported: no traceback

from data import corpus
from data.files import Arguments, DataError, run_script, shown

VAL_TOKENS = 20480  # five batches of 4 rows of 1024


def prepare_topics(prefix: str | Path) -> tuple[int, int]:
    """Writes the two token files, a document a topic. Returns how many tokens they hold. Raises DataError."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python lacks its help topics (pydoc_data): `python data/tinyshakespeare.py` makes another corpus"
        ) from None
    return corpus.prepare((topics[name] for name in sorted(topics)), prefix, VAL_TOKENS)


def main() -> None:
    parser = Arguments(description="Writes Python's help topics as GPT-2 tokens, for train_gpt2_fp32.py -i PREFIX.")
    parser.add_argument("--prefix", default=corpus.PYDOC_TOPICS, help="of the files to write (%(default)s)")
    args = parser.parse_args()
    for path, count in zip(corpus.token_files(args.prefix), prepare_topics(args.prefix), strict=True):
        print(f"{shown(path)}: {count:,} tokens")


if __name__ == "__main__":
    run_script(main)
