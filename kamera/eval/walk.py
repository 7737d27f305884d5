"""A walk over the user's own pictures: a window that slides, looks back and reorders, beside a re-prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kamera.certify import contents_of, kl
from kamera.content import Chunk, Spoken
from kamera.engines.hf import Backbone, HfEngine
from kamera.eval.demo import BLIND, CACHE, KAMERA, Demo, DemoRow, behind_change, blind_of, hear, over_all
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import Event, KameraWindow, Report, former_of

QUESTION = "What is shown?"


class Ask(NamedTuple):
    """A question: as it is printed, as the model gets it, and how the right answer begins.

    Without ``truth`` right is what the re-prefill says, to the letter.
    """

    shown: str
    spoken: Spoken
    truth: str | None = None


def walk_files(
    backbone: Backbone | HfEngine,
    files: Sequence[Path],
    questions: Sequence[str] = (QUESTION,),
    *,
    keep: int = 3,
    max_new_tokens: int = 16,
    system: Spoken | None = None,
) -> Iterator[str | Demo]:
    """Walk a window of ``keep`` pictures or passages over ``files``, and ask the ``questions`` each time.

    Raises ValueError for a file that is neither picture nor text, and as `walk`.
    """
    asked = [Ask(question, question) for question in questions]
    contents = contents_of(files)
    yield from walk(
        backbone,
        contents,
        asked,
        arrival="new picture",
        keep=keep,
        max_new_tokens=max_new_tokens,
        system=system,
    )


def walk(
    backbone: Backbone | HfEngine,
    contents: Sequence[Any],
    questions: Sequence[Ask] | Mapping[int, Sequence[Ask]],
    *,
    arrival: str,
    keep: int,
    max_new_tokens: int,
    system: Spoken | None = None,
) -> Iterator[str | Demo]:
    """Walk a window of ``keep`` over ``contents``; yields progress, then the table.

    After each operation the questions are asked of the window under the default policy, of one in which
    all is prefilled again (a prefix cache's answers, which are the plain model's), and of blind reuse. Of a
    mapping by content those are asked whose content is in view. ``arrival`` names the operation in which one
    comes and the oldest leaves. Raises ValueError for fewer than two more contents than
    ``keep``.
    """
    engine = backbone.engine
    chunks = [engine.chunk(content) for content in contents]
    if keep < 2 or len(chunks) < keep + 2:
        raise ValueError(f"{len(chunks)} contents for a window of {keep}: give at least {max(keep, 2) + 2}")
    window, events = KameraWindow(engine, ChunkStore.open("memory://"), system), list[Event]()
    window.on_event(partial(hear, events))
    for chunk in chunks[:keep]:
        window.append(chunk)
    window.flush()
    steps = [(arrival, partial(_slide, window, partial(window.append, chunk))) for chunk in chunks[keep:]]
    steps.append(("look back", partial(_slide, window, partial(window.recall, chunks[0].id))))
    steps.append(("another order", partial(window.reorder, [*range(1, keep), 0])))
    rows: dict[tuple[str, str], list[DemoRow]] = {}
    worths, answers = dict[str, str](), list[tuple[str, ...]]()
    ids = [chunk.id for chunk in chunks]
    for name, run in steps:
        before, spent = [slot.chunk_id for slot in window.slots], window.usage().background.tokens
        started = time.perf_counter()
        tokens = run().tokens_recomputed
        seconds = time.perf_counter() - started
        shown = window.fork()
        window.flush()
        later = window.usage().background.tokens - spent
        asked = questions if isinstance(questions, Sequence) else _in_view(questions, ids, shown)
        compared = _compare(shown, before, dict(zip(ids, chunks, strict=True)), system, asked, max_new_tokens)
        for row, said in compared:
            row = replace(row, operation=name)
            rows.setdefault((name, row.arm), []).append(
                replace(row, tokens=tokens, background=later, seconds=seconds) if row.arm == KAMERA else row
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
    questions: Sequence[Ask],
    max_new_tokens: int,
) -> Iterator[tuple[DemoRow, list[tuple[str, str, str]]]]:
    """A row of each arm for a window that held the chunks ``before``; with that of Kamera what was said."""
    order = [slot.chunk_id for slot in shown.slots]
    fresh = KameraWindow(
        former_of(shown).backbone, ChunkStore.open("memory://"), system, policy=ReusePolicy.exact()
    )
    started = time.perf_counter()
    for chunk_id in order:
        fresh.append(chunks[chunk_id])
    seconds = time.perf_counter() - started  # nearly all of it is behind the change
    cached = sum(chunks[chunk_id].num_tokens for chunk_id in behind_change(before, order))
    ideal, wanted = _asked(fresh, questions, max_new_tokens)
    for arm, window, tokens in ((CACHE, fresh, cached), (KAMERA, shown, 0), (BLIND, blind_of(shown), 0)):
        logits, said = _asked(window, questions, max_new_tokens)
        right = sum(
            a == b if question.truth is None else a.startswith(question.truth)
            for question, a, b in zip(questions, said, wanted, strict=True)
        )
        off = float(kl(logits, ideal).mean())
        row = DemoRow("", arm, tokens, 0, right, len(questions), off, seconds if arm == CACHE else 0.0)
        told = [question.shown for question in questions]
        yield row, [*zip(told, wanted, said, strict=True)] if arm == KAMERA else []


def _in_view(questions: Mapping[int, Sequence[Ask]], ids: Sequence[str], window: KameraWindow) -> list[Ask]:
    return [ask for slot in window.slots for ask in questions[ids.index(slot.chunk_id)]]


def _asked(window: KameraWindow, questions: Sequence[Ask], tokens: int) -> tuple[torch.Tensor, list[str]]:
    """Logits ``[questions, vocabulary]`` of the answers' first tokens, and the answers."""
    logits = torch.stack([window.next_token_logits(question.spoken) for question in questions])
    said = [str(window.generate(ask.spoken, max_new_tokens=tokens, do_sample=False)) for ask in questions]
    return logits, said
