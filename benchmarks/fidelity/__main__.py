"""What each way of serving a chunk loses on real language weights, and what a sliding window costs.

    python -m benchmarks.fidelity [--models smollm2 gemma3-270m] [--documents 40] [--output FILE]

Tables for each model, on passages of documentation that is installed here (`benchmarks.texts`):

* ``own``, ``other``: one chunk behind three others, from its own document or from others.
* ``sliding``: passages are read one after another, the last N stay. ``shown``: the same, under other
  thresholds, stored as patches, mixed. ``more``: the oldest leaves first, slots are formed again.

KL(re-prefill ‖ arm) of next-token distributions, in nats, is a mean over the document's own next tokens
("text"), and over the model's own answer to a question about the chunk ("answer"). η is relative to blind
reuse of the same chunks. "restored": of the tokens whose likeliest successor blind reuse flips, the share
that the arm gives back. Intervals: 95 %, bootstrap over documents.

With --output every document is kept as it is done, and a second run goes on from there; --documents 0 prints
what is there. --sabotage breaks an
operator: a table that does not change with it measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import intervals, texts, weights
from benchmarks.fidelity import arms, sliding
from benchmarks.fidelity.reader import Reader, Source
from benchmarks.machine import circumstances
from kamera.cli.output import listing, print_tables

TEXT, ANSWER, SLIDING_TEXT = 32, 24, 48
"""Tokens that are judged."""

READ, KEPT = 12, (2, 3, 4, 8)
"""Passages that a sliding window reads at most, and how many of them stay."""

LONGEST_CHUNK = 160
"""Tokens of the longest passage behind others."""

LONGEST_READ = 100
"""Tokens of its longest passage: they are read again for each way of keeping them."""

WALKS: dict[str, tuple[Sequence[sliding.Keep], Sequence[sliding.Keep], Sequence[int]]] = {
    "sliding": (sliding.KEEPS, (), KEPT),
    "shown": (sliding.KEEPS[2:3], sliding.SHOWN, (4, 8)),
    "more": (sliding.MORE, (), (4,)),
}
TABLES = ("own", "sliding", "shown", "other", "more")

Row = dict[str, Any]
"""What one document says of one arm."""


def measure_arms(
    reader: Reader,
    document: texts.Document,
    table: str,
    others: Sequence[texts.Document],
    groups: Sequence[str] = arms.GROUPS,
) -> list[Row]:
    """Rows of every arm, behind antecedents of the document's own or of others."""
    *before, chunk, follows = document.passages
    front = before if table == "own" else [other.passages[0] for other in others]
    gone, *antecedents = (_chunk(reader, text) for text in front)
    last = _chunk(reader, chunk)
    passages = arms.Passages(gone, tuple(antecedents), last)
    title = chunk.partition(":")[0]
    question = reader.question(f"What does the note on {title} say? Answer in one or two sentences.")
    served = arms.arms(reader, passages, groups)
    true = next(served)
    answer = reader.answer(question, [*antecedents, last], true.sources, ANSWER)
    asked = [reader.tokenize(follows)[: TEXT + 1], torch.cat([question, answer])[:-1]]
    kept = (TEXT, len(answer))
    reference = _judged(reader, asked, kept, true.sources)
    rows: list[Row] = []
    for arm in served:
        losses = _losses(reference, _judged(reader, asked, kept, arm.sources))
        row = {"table": table, "arm": arm.name, "whole": arm.whole}
        row["size"] = round(arm.size, 4)
        rows.append(row | {f"{key} {name}": v for name, loss in losses for key, v in loss.items()})
    return rows


def measure_sliding(reader: Reader, document: texts.Document, table: str) -> list[Row]:
    """Rows of ways to keep a window, for each number of passages that stay."""
    keeps, shown, kept = WALKS[table]
    *read, follows = document.passages
    passages = sliding.Passages(reader, [_chunk(reader, text) for text in read])
    text = reader.tokenize(follows)[: SLIDING_TEXT + 1]
    rows: list[Row] = []
    for most in kept:
        walked = sliding.windows(passages, most, keeps, shown)
        reference = _judged(reader, [text], (SLIDING_TEXT,), next(walked).sources)
        for window in walked:
            logits = _judged(reader, [text], (SLIDING_TEXT,), window.sources)
            ((_, loss),) = _losses(reference, logits)
            words = text[1 : SLIDING_TEXT + 1, None]
            nats = (reference[0] - logits[0]).gather(1, words).mean()
            row = {"table": table, "kept": most, "arm": window.name, "nats": round(float(nats), 6)}
            tokens = {"now": window.now, "background": window.background, "prefix": window.prefix_cache}
            rows.append(row | {key: round(value, 3) for key, value in tokens.items()} | loss)
    return rows


def _chunk(reader: Reader, text: str) -> torch.Tensor:
    return reader.tokenize(f"{text}\n\n")


def _judged(
    reader: Reader, asked: Sequence[torch.Tensor], kept: Sequence[int], sources: Sequence[Source]
) -> list[torch.Tensor]:
    """Log probabilities ``[tokens, vocabulary]`` of the last ``kept`` tokens of each text."""
    found = (reader.logits([text], sources)[0] for text in asked)  # one is not filled up to the other
    return [x[-count:].float().log_softmax(-1) for x, count in zip(found, kept, strict=True)]


def _losses(reference: Sequence[torch.Tensor], arm: Sequence[torch.Tensor]) -> Iterator[tuple[str, Row]]:
    for name, true, ours in zip(("text", "answer"), reference, arm, strict=False):
        divergence = (true.exp() * (true - ours)).sum(-1).mean()
        agrees = true.argmax(-1) == ours.argmax(-1)
        bits = "".join("01"[int(a)] for a in agrees)
        yield name, {"kl": float(f"{max(0.0, float(divergence)):.5g}"), "agrees": bits}


# -- tables --------------------------------------------------------------------------------------


def arm_rows(rows: Sequence[Row], table: str) -> Iterator[Row]:
    """One row an arm: estimates over documents."""
    found = _by_arm(row for row in rows if row["table"] == table)
    for name, some in found.items():
        blind = found["blind, all" if some[0]["whole"] else "blind"]
        out: Row = {"arm": name, "n": len(some)}
        out["size"] = _plain_mean(row["size"] for row in some)
        for kind in ("text", "answer"):
            out |= {f"{key} {kind}": value for key, value in _estimates(some, blind, f" {kind}").items()}
        yield out


def sliding_rows(rows: Sequence[Row], table: str, kept: int) -> Iterator[Row]:
    """One row a way of keeping a window of ``kept``."""
    found = _by_arm(row for row in rows if row["table"] == table and row.get("kept") == kept)
    for name, some in found.items():
        out: Row = {"arm": name, "n": len(some), **_estimates(some, found["blind"], "")}
        out["nats"] = _plain_mean(row["nats"] for row in some)
        yield out | {key: _plain_mean(row[key] for row in some) for key in ("now", "background", "prefix")}


def _estimates(some: Sequence[Row], blind: Sequence[Row], kind: str) -> Row:
    kl, none = ([row[f"kl{kind}"] for row in of] for of in (some, blind))
    pairs = [(row[f"agrees{kind}"], other[f"agrees{kind}"]) for row, other in zip(some, blind, strict=True)]
    flipped = [was.count("0") for _, was in pairs]
    back = [sum(a + b == "10" for a, b in zip(now, was, strict=True)) for now, was in pairs]
    return {
        "kl": intervals.mean(kl),
        "eta": intervals.eta(kl, none),
        "top-1": _plain_mean(now.count("1") / len(now) for now, _ in pairs),
        "restored": intervals.restored(back, flipped).mean,
    }


def _by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return found


def _plain_mean(values: Iterable[float]) -> float:
    x = list(values)
    return sum(x) / len(x)


def tables(model: str, rows: Sequence[Row]) -> Iterator[Table]:
    """The tables of a model."""
    for table in ("own", "other"):
        made = [_cells(row) for row in arm_rows(rows, table)]
        if made:
            title = f"\n{model}: antecedents of {'its own' if table == 'own' else 'other'} documents"
            yield listing(title, list(made[0]), _values(made))
    for table, kept in ((table, kept) for table, (_, _, some) in WALKS.items() for kept in some):
        made = [_cells(row) for row in sliding_rows(rows, table, kept)]
        if made:
            yield listing(f"\n{model}: the last {kept} stay", list(made[0]), _values(made))


def _cells(row: Row) -> Row:
    return {key: str(x) if not isinstance(x, float) else f"{x:.3f}" for key, x in row.items()}


def _values(rows: Sequence[Row]) -> list[list[str]]:
    return [list(row.values()) for row in rows]


# -- runs ----------------------------------------------------------------------------------------


def run(model: str, args: argparse.Namespace, kept: Row) -> Iterator[Row]:
    """Measure documents of a model that are not in ``kept`` yet; yields ``kept`` after each."""
    reader, count = Reader(weights.load(model), args.sabotage), args.documents
    tokens = reader.tokenize
    for table in args.tables:
        passages, longest = (6, LONGEST_CHUNK) if table in ("own", "other") else (READ + 1, LONGEST_READ)
        found = texts.documents(count, lambda s: tokens(s).tolist(), passages=passages, longest=longest)
        kept.setdefault("digests", {})[table] = texts.digest(found)
        for i, document in enumerate(found):
            key = f"{table} {document.name}"
            if key in kept.setdefault("documents", {}):
                continue
            with torch.no_grad():
                if table in ("own", "other"):
                    others = [found[(i + j) % len(found)] for j in range(1, 5)]
                    kept["documents"][key] = measure_arms(reader, document, table, others, args.groups)
                else:
                    kept["documents"][key] = measure_sliding(reader, document, table)
            print(f"{model}, {table}: {i + 1} of {len(found)}, {document.name}", file=sys.stderr, flush=True)
            yield kept


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3-270m"])
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tables", nargs="+", default=TABLES, choices=TABLES)
    parser.add_argument("--groups", nargs="+", default=arms.GROUPS, choices=arms.GROUPS, help="of arms")
    parser.add_argument("--sabotage", choices=["no-rotation", "foreign-patch"], default="")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="json: all documents")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: Row = {"command": f"python -m benchmarks.fidelity {' '.join(sys.argv[1:])}", **circumstances()}
    report["models"] = {}
    if args.output is not None and args.output.exists():
        report["models"] = json.loads(args.output.read_text(encoding="utf-8"))["models"]
    for model in args.models:
        kept = report["models"].setdefault(model, {})
        for _ in run(model, args, kept) if args.documents else ():
            if args.output is not None:
                args.output.write_text(json.dumps(report), encoding="utf-8")
        rows = [row for some in kept["documents"].values() for row in some]
        if args.format == "table":
            print_tables(Console(width=200), tables(model, rows))
    if args.format == "json":
        print(json.dumps(report))


if __name__ == "__main__":
    main()
