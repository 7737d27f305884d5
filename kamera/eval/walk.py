"""A walk over the user's own pictures: a window that slides, looks back and reorders, beside a re-prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kamera.certify import contents_of, kl
from kamera.content import Chunk, Spoken
from kamera.engines.hf import Backbone, HfEngine
from kamera.eval.demo import BLIND, CACHE, KAMERA, Demo, DemoRow, behind_change, blind_of, hear, over_all
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import Event, KameraWindow, Report, former_of

QUESTION = "What is shown?"


def walk_files(
    backbone: Backbone | HfEngine,
    files: Sequence[Path],
    questions: Sequence[str] = (QUESTION,),
    *,
    keep: int = 3,
    max_new_tokens: int = 16,
    system: Spoken | None = None,
) -> Iterator[str | Demo]:
    """Walk a window of ``keep`` pictures or passages over ``files``; yields progress, then the table.

    After each operation the ``questions`` are asked of the window under the default policy, of one in which
    all is prefilled again (a prefix cache's answers, which are the plain model's), and of blind reuse.
    ``DemoRow.right`` counts answers that equal the re-prefill's to the letter. Raises ValueError for a file
    that is neither picture nor text, and for fewer than two more contents than ``keep``.
    """
    engine = backbone.engine
    chunks = [engine.chunk(content) for content in contents_of(files)]
    if keep < 2 or len(chunks) < keep + 2:
        raise ValueError(
            f"{len(chunks)} contents, {keep} in view: give two more than stay in view, which are two"
        )
    window, events = KameraWindow(engine, ChunkStore.open("memory://"), system), list[Event]()
    window.on_event(partial(hear, events))
    for chunk in chunks[:keep]:
        window.append(chunk)
    window.flush()
    steps = [
        ("new picture", partial(_slide, window, partial(window.append, chunk))) for chunk in chunks[keep:]
    ]
    steps.append(("look back", partial(_slide, window, partial(window.recall, chunks[0].id))))
    steps.append(("another order", partial(window.reorder, [*range(1, keep), 0])))
    rows: dict[tuple[str, str], list[DemoRow]] = {}
    worths, answers = dict[str, str](), list[tuple[str, ...]]()
    for name, run in steps:
        before, spent = [slot.chunk_id for slot in window.slots], window.usage().background.tokens
        tokens = run().tokens_recomputed
        shown = window.fork()
        window.flush()
        later = window.usage().background.tokens - spent
        compared = _compare(
            shown, before, {chunk.id: chunk for chunk in chunks}, system, questions, max_new_tokens
        )
        for row, said in compared:
            row = replace(row, operation=name)
            rows.setdefault((name, row.arm), []).append(
                replace(row, tokens=tokens, background=later) if row.arm == KAMERA else row
            )
            answers += [(name, *three) for three in said]
        worths[name] = " ".join(slot.guarantee for slot in shown.slots)
        yield name
    yield Demo(tuple(map(over_all, rows.values())), 1, tuple(worths.items()), tuple(events), tuple(answers))


def _slide(window: KameraWindow, arrive: Callable[[], Report]) -> Report:
    """The report of an arrival behind a slide, with the tokens of both."""
    gone = window.slide()
    report = arrive()
    return replace(report, tokens_recomputed=gone.tokens_recomputed + report.tokens_recomputed)


def _compare(
    shown: KameraWindow,
    before: Sequence[str],
    chunks: Mapping[str, Chunk],
    system: Spoken | None,
    questions: Sequence[str],
    max_new_tokens: int,
) -> Iterator[tuple[DemoRow, list[tuple[str, str, str]]]]:
    """A row of each arm for a window that held the chunks ``before``; with that of Kamera what was said."""
    order = [slot.chunk_id for slot in shown.slots]
    fresh = KameraWindow(
        former_of(shown).backbone, ChunkStore.open("memory://"), system, policy=ReusePolicy.exact()
    )
    for chunk_id in order:
        fresh.append(chunks[chunk_id])
    cached = sum(chunks[chunk_id].num_tokens for chunk_id in behind_change(before, order))
    ideal, wanted = _asked(fresh, questions, max_new_tokens)
    for arm, window, tokens in ((CACHE, fresh, cached), (KAMERA, shown, 0), (BLIND, blind_of(shown), 0)):
        logits, said = _asked(window, questions, max_new_tokens)
        right = sum(a == b for a, b in zip(said, wanted, strict=True))
        row = DemoRow("", arm, tokens, 0, right, len(questions), float(kl(logits, ideal).mean()))
        yield row, [*zip(questions, wanted, said, strict=True)] if arm == KAMERA else []


def _asked(window: KameraWindow, questions: Sequence[str], tokens: int) -> tuple[torch.Tensor, list[str]]:
    """Logits ``[questions, vocabulary]`` of the answers' first tokens, and the answers."""
    logits = torch.stack([window.next_token_logits(question) for question in questions])
    said = [window.generate(question, max_new_tokens=tokens, do_sample=False) for question in questions]
    return logits, said
