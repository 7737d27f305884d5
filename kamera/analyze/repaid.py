"""After how many reuses a stored chunk has repaid what storing it cost, reading included."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from kamera.analyze.positions import Advance
from kamera.content import Chunk
from kamera.engines.hf import Backbone, HfEngine
from kamera.store import ChunkStore
from kamera.store.keys import KVForm
from kamera.trust import ReusePolicy
from kamera.window import KameraWindow, SlotReport

FORMS: tuple[KVForm, ...] = get_args(KVForm)
HEADER, QUESTION = 64, 8
"""Tokens in front of the chunk, and of what is asked behind it."""


def breakeven(
    backbone: Backbone | HfEngine,
    ids: torch.Tensor,
    *,
    tokens: int = 1024,
    rounds: int = 3,
    forms: Sequence[KVForm] = FORMS,
    folder: str | Path | None = None,
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """Time to the first token behind a chunk of ``tokens`` of ``ids``, prefilled and out of a store on disk.

    A row for each form of stored KV, medians over ``rounds``: ``prefill`` seconds without a store, ``miss``
    with one, until canonical and patch are on disk, ``hit`` out of the store, which is opened anew for it,
    and ``read`` of that, to find, read and verify the ``bytes`` (not decoded yet). ``invested`` is miss −
    prefill, ``saved`` prefill − hit, ``f_star`` their ratio: the reuses that repay one miss (None: a reuse
    saves nothing). ``miss_tokens`` and ``hit_tokens`` ran in them, the question's aside; ``f_star_tokens``
    is the ratio of tokens, which no load of the machine changes. The store is made
    in a new folder below ``folder`` (None: that of temporary files). Raises ValueError for text that is too
    short, RuntimeError if the store does not serve the chunk.
    """
    engine = backbone.engine
    if tokens < 1 or rounds < 1:
        raise ValueError(f"tokens={tokens}, rounds={rounds}: give 1 or more of each")
    if len(ids) < HEADER + tokens + QUESTION:
        raise ValueError(f"the trace has {len(ids)} tokens of text, {HEADER + tokens + QUESTION} are needed")
    parts = ids[: HEADER + tokens + QUESTION].split([HEADER, tokens, QUESTION])
    header, body = (engine.chunk_from_tensors(part) for part in parts[:2])
    seconds: dict[str, list[float]] = {}
    counts: dict[str, dict[str, int]] = {}
    for number in range(rounds + 1):
        if number == 1:
            seconds.clear()  # the first round warms up
        window = _behind(engine, ChunkStore.open("memory://"), header, ReusePolicy.exact())
        _timed(seconds, "prefill", partial(_first_token, window, body, parts[2]))
        window.flush()
        for place, form in enumerate(forms):
            with tempfile.TemporaryDirectory(dir=folder) as made:
                counts[form] = _round(engine, made, form, header, body, parts[2], seconds)
            advance(number * len(forms) + place + 1, (rounds + 1) * len(forms))
    prefill = statistics.median(seconds["prefill"])
    rows = []
    for form in forms:
        own = {name: statistics.median(seconds[f"{form} {name}"]) for name in ("miss", "hit", "read")}
        invested, saved = own["miss"] - prefill, prefill - own["hit"]
        times = {"prefill": prefill, **own, "invested": invested, "saved": saved}
        own_tokens = counts[form]["miss_tokens"] - tokens, tokens - counts[form]["hit_tokens"]
        stars = {"f_star": repaid(invested, saved), "f_star_tokens": repaid(*own_tokens)}
        rows.append({"form": form, **counts[form], **times, **stars})
    return {"tokens": tokens, "rounds": rounds, "rows": rows}


def repaid(invested: float, saved: float) -> float | None:
    """How often ``saved`` has to come for ``invested``, both in one unit; None if nothing is saved."""
    return max(0.0, invested) / saved if saved > 0 else None


def _round(
    engine: HfEngine,
    folder: str,
    form: KVForm,
    header: Chunk,
    body: Chunk,
    question: torch.Tensor,
    seconds: dict[str, list[float]],
) -> dict[str, int]:
    """A miss and a hit, timed. Tokens that ran in each, and bytes of the chunk's objects."""
    policy = ReusePolicy(minimum="patched", forms="always")
    with ChunkStore.open(folder, kv=form) as store:
        window = _behind(engine, store, header, policy)
        window.flush()
        before = window.usage()

        def miss() -> None:
            _first_token(window, body, question)
            window.flush()

        _timed(seconds, f"{form} miss", miss)
        after = window.usage()
        ran = sum(b.tokens - a.tokens for a, b in zip(before, after, strict=True)) - len(question)
        infos = store.ls(chunk_id=body.id)
    with ChunkStore.open(folder, kv=form) as store:
        window = _behind(engine, store, header, policy)
        report = _timed(seconds, f"{form} hit", partial(_first_token, window, body, question))
        if report.slot.guarantee != "patched" or report.forwards:
            raise RuntimeError(f"the store was to serve the chunk patched, and it is {report.slot}")
    with ChunkStore.open(folder, kv=form) as store:

        def read() -> None:
            for info in infos:
                if info.kind == "canonical":
                    store.get_canonical(info.context, body.id)
                elif info.kind == "patch":
                    store.get_patch(info.context, body.id, info.antecedents)

        _timed(seconds, f"{form} read", read)
    sizes = sum(info.bytes for info in infos)
    return {"bytes": sizes, "miss_tokens": ran, "hit_tokens": report.tokens_recomputed}


def _behind(engine: HfEngine, store: ChunkStore, header: Chunk, policy: ReusePolicy) -> KameraWindow:
    window = KameraWindow(engine, store, policy=policy)
    window.append(header)
    return window


def _first_token(window: KameraWindow, body: Chunk, question: torch.Tensor) -> SlotReport:
    report = window.append(body)
    window.next_token_logits(question)
    return report


def _timed(seconds: dict[str, list[float]], name: str, work: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    done = work()
    seconds.setdefault(name, []).append(time.perf_counter() - started)
    return done
