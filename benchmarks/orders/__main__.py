"""Orbit patches end to end: forwards that prepare all orders of a window, and what each order then loses.

    python -m benchmarks.orders [--model smollm2] [--documents 4] [--rank 32]

A window holds K passages of a document (`benchmarks.texts`). `KameraWindow.prepare_orders` runs once, then
the window takes every order. Held against the re-prefill of the same order is the model's own answer to a
question about the last passage. A second table forms one orbit patch of a passage behind three others over
more and more orderings, and serves it in all six orders of these.

``prepare`` and ``reorder`` are forwards (reorder: the most that any order ran). KL(served ‖ re-prefill) is a
mean over tokens and orders, in nats; η is relative to blind reuse of the same orders, its interval is a
bootstrap over documents. ``spread`` is what the patch leaves out of the deficits behind single orders, as
the slot tells it. Under --rank 1 η falls and the spread grows, else the table measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import torch

from benchmarks import intervals, report, texts
from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.certify import kl
from kamera.content import Chunk
from kamera.window import Arrange, answer_of, keep_orbit, logits_of_answers

ANSWER = 24
"""Tokens of an answer that are judged, at most."""

Asked = list[tuple[str, torch.Tensor]]
"""A question, and the answer whose tokens are judged."""


def chunks_of(backbone: Backbone, document: texts.Document) -> tuple[list[Chunk], str]:
    """A document's passages, and a question about the last of them."""
    contents = [[{"type": "text", "text": f"{text}\n\n"}] for text in document.passages]
    title = document.passages[-1].partition(":")[0]
    return [
        backbone.chunk(one) for one in contents
    ], f"What does the note on {title} say? Answer in a sentence."


def filled(
    backbone: Backbone, store: ChunkStore, chunks: Sequence[Chunk], policy: ReusePolicy
) -> KameraWindow:
    """A window of these chunks, with all that it left to do done."""
    window = KameraWindow(backbone, store, policy=policy)
    window.run(Arrange(chunks))
    window.flush()
    return window


def judged(window: KameraWindow, asked: Asked, true: torch.Tensor) -> float:
    """KL of what a window serves to its re-prefill's logits ``true`` ``[tokens, vocabulary]``."""
    return float(kl(torch.cat(logits_of_answers(window, asked)), true).mean())


def blind(window: KameraWindow, slots: Sequence[int]) -> KameraWindow:
    """A fork that shows the canonicals of these slots."""
    fork = window.fork()
    for index in slots:
        fork.condition(index, False)
    return fork


def serves(rank: int) -> ReusePolicy:
    """What is stored is served; nothing else is formed than what is asked for."""
    return ReusePolicy(on_miss="prefill", patch_bytes=None, rank=rank)


def all_orders(backbone: Backbone, document: texts.Document, rank: int) -> Iterator[report.Row]:
    """A row for each order of a document's passages."""
    chunks, question = chunks_of(backbone, document)
    store = ChunkStore.open("memory://")
    window = filled(backbone, store, chunks, replace(serves(rank), forms="always"))
    prepared = window.prepare_orders().forwards
    window.flush()
    asked: Asked = []
    for order in permutations(range(len(chunks))):
        wanted = [chunks[i] for i in order]
        exact = filled(backbone, ChunkStore.open("memory://"), wanted, ReusePolicy.exact())
        asked = asked or [(question, answer_of(exact, question, max_new_tokens=ANSWER))]
        true = torch.cat(logits_of_answers(exact, asked))
        places = [slot.chunk_id for slot in window]
        ran = window.reorder([places.index(chunk.id) for chunk in wanted]).forwards
        errors = [slot.error for slot in window if slot.guarantee == "orbit" and slot.error is not None]
        yield {
            "prepare": prepared,
            "reorder": ran,
            "orbit": sum(slot.guarantee == "orbit" for slot in window),
            "spread": sum(errors) / max(1, len(errors)),
            "kl": judged(window, asked, true),
            "blind": judged(blind(window, range(len(chunks))), asked, true),
        }


def by_samples(
    backbone: Backbone, document: texts.Document, samples: Sequence[int], rank: int
) -> Iterator[report.Row]:
    """A row for each number of orderings and each order of the three passages in front of the last."""
    chunks, question = chunks_of(backbone, document)
    *front, last = chunks
    windows: list[tuple[int, int, ChunkStore]] = []
    for count in samples:
        store = ChunkStore.open("memory://")
        window = filled(backbone, store, chunks, serves(rank))
        ran = keep_orbit(window, len(front), samples=count).forwards
        windows.append((count, ran, store))
    asked: Asked = []
    for order in permutations(front):
        exact = filled(backbone, ChunkStore.open("memory://"), [*order, last], ReusePolicy.exact())
        asked = asked or [(question, answer_of(exact, question, max_new_tokens=ANSWER))]
        true = torch.cat(logits_of_answers(exact, asked))
        for count, ran, store in windows:
            shown = filled(backbone, store, [*order, last], serves(rank))
            slot = shown.slots[-1]
            if slot.guarantee != "orbit":
                raise RuntimeError(f"the orbit patch was to be served, and it is {slot}")
            none = blind(shown, [len(front)])
            yield {
                "samples": count,
                "prepare": ran,
                "spread": slot.error,
                "kl": judged(shown, asked, true),
                "blind": judged(none, asked, true),
            }


def joined(rows: Sequence[Sequence[report.Row]]) -> report.Row:
    """One row of many documents' rows."""
    means = {name: [sum(r[name] for r in some) / len(some) for some in rows] for name in ("kl", "blind")}
    flat = [row for some in rows for row in some]
    found: report.Row = {"documents": len(rows), "prepare": max(row["prepare"] for row in flat)}
    if "reorder" in flat[0]:
        found = {**found, "reorder": max(row["reorder"] for row in flat), "orders": len(rows[0])}
    return {
        **found,
        "spread": sum(row["spread"] for row in flat if row["spread"]) / len(flat),
        "KL": intervals.mean(means["kl"]),
        "KL blind": intervals.mean(means["blind"]),
        "eta": intervals.eta(means["kl"], means["blind"]),
        "eta of the worst order": min(1 - row["kl"] / row["blind"] for row in flat),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("orders", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--chunks", type=int, nargs="*", default=[3, 4], help="K of the first table")
    parser.add_argument("--samples", type=int, nargs="*", default=[1, 2, 3, 6], help="of the second")
    parser.add_argument("--rank", type=int, default=32, help="of the patches")
    options = parser.parse_args(arguments)
    rows = list(table(Backbone.from_pretrained(options.model), options))
    report.tell(options, f"Orders of a window, {options.model}", rows)
    return 0


def table(backbone: Backbone, options: argparse.Namespace) -> Iterator[report.Row]:
    """The rows of both tables."""
    tokens = backbone.engine.builder.tokenize
    with torch.no_grad():
        for count in options.chunks:
            found = texts.documents(
                options.documents, lambda s: tokens(s).tolist(), passages=count, longest=120
            )
            made = []
            for document in found:
                made.append(list(all_orders(backbone, document, options.rank)))
                report.progress(f"{count} chunks: {len(made)} of {len(found)}, {document.name}")
            yield {"chunks": count, "samples": None, **joined(made)}
        if not options.samples:
            return
        found = texts.documents(options.documents, lambda s: tokens(s).tolist(), passages=4, longest=120)
        each = []
        for document in found:
            each.append(list(by_samples(backbone, document, options.samples, options.rank)))
            report.progress(f"orderings: {len(each)} of {len(found)}, {document.name}")
        for count in options.samples:
            rows = [[row for row in some if row["samples"] == count] for some in each]
            yield {"chunks": 4, "samples": count, **joined(rows)}


if __name__ == "__main__":
    sys.exit(main())
