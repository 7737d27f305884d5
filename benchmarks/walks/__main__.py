"""What an operation walks through: Python calls, functions and files, under the default policy.

A window of texts, and a chat of ten turns that only grows; all on the thread of the call. Counted are calls
of Kamera's own functions (a generator counts at each step), so the numbers are the same on every machine.

    python -m benchmarks.walks [--model smollm2]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks import report
from benchmarks.calls import Called, called
from kamera import Backbone, ChatSession, ChunkStore, KameraWindow

TEXT = "Note {0}: the ferry to island {0} leaves at {0} and comes back with mail, milk and a few guests. "


def rows(backbone: Backbone) -> Iterator[report.Row]:
    """A row for each operation."""
    window = KameraWindow(backbone, ChunkStore.open("memory://"), system="You read notes.")
    first = window.append(TEXT.format(0)).slot
    for number in range(1, 5):
        window.append(TEXT.format(number))
    window.flush()
    operations: dict[str, Callable[[], object]] = {
        "append, new": lambda: window.append(TEXT.format(5)),
        "slide": lambda: window.slide(1),
        "recall": lambda: window.recall(first.chunk_id),
        "reorder": lambda: window.reorder([0, 2, 1, 3, 4, 5]),
        "reorder, again": lambda: window.reorder([0, 2, 1, 3, 4, 5]),
        "generate, one token": lambda: window.generate("When?", max_new_tokens=1),
    }
    for name, operation in operations.items():
        yield _row(name, called(operation))
        window.flush()
    session = ChatSession(backbone, ChunkStore.open("memory://"))
    session.send(TEXT.format(0), max_new_tokens=1)
    turns: list[Called] = []
    for _ in range(9):
        session.flush()
        turns.append(called(lambda: session.send(TEXT.format(9), max_new_tokens=1)))
    yield _row("turn 2 of a chat", turns[0])
    yield {**_row("turn 10 of a chat", turns[-1]), "times turn 2": turns[-1].calls / turns[0].calls}


def _row(name: str, seen: Called) -> report.Row:
    return {
        "operation": name,
        "Python calls": seen.calls,
        "functions": len(seen.codes),
        "files": len(seen.files),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("walks", __doc__)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args(arguments)
    backbone = Backbone.from_pretrained(options.model)
    report.tell(options, f"What an operation walks through, {options.model}", list(rows(backbone)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
