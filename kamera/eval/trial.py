"""One question behind windows, asked under arms: what every benchmark here runs, and what it keeps of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kamera.eval.adapter import Adapter, ArmQuestion, Reply, Unit
from kamera.eval.arms import NATIVE, REPREFILL, Maker
from kamera.eval.desk import Desk
from kamera.eval.first_token import FirstToken

UNANSWERED = "None"
"""Response to what does not fit (the published benchmarks' own convention)."""


@dataclass(frozen=True)
class Trial:
    """One arm's answer to one item, and its price.

    ``first_token`` is over the ids of the reference's (None without a reference). ``window_tokens``,
    ``recomputed_tokens``, ``kept_bytes`` and ``forwards`` are of the window alone (`Reply`), ``live_tokens``
    and ``live_forwards`` of parts that arrived with the question. ``kv_bytes`` is the KV of both,
    ``patch_bytes`` what is kept beside the window's canonicals. ``note`` is empty, "cut" (parts dropped from
    the left), "over-length" or "out of memory" (both answered "None"). ``error`` is the reason for a missing
    answer.
    """

    item: str
    arm: str
    answer: str = ""
    first_token: FirstToken | None = None
    window_tokens: int = 0
    recomputed_tokens: float = 0.0
    kept_bytes: int = 0
    forwards: int = 0
    ttft_seconds: float = 0.0
    error: str = ""
    note: str = ""
    question_tokens: int = 0
    live_tokens: int = 0
    live_forwards: int = 0
    patch_bytes: int = 0
    kv_bytes: int = 0
    answer_seconds: float = 0.0

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Trial:
        values = dict(document)
        if (first := values.pop("first_token", None)) is not None:
            values["first_token"] = FirstToken(tuple(first["ids"]), tuple(first["log_probs"]), first["rest"])
        return cls(**values)

    @property
    def computed_tokens(self) -> int:
        """Those of the prompt that were computed for this answer, without the question's."""
        return round(self.recomputed_tokens) + self.live_tokens

    def failed(self, error: Exception) -> Trial:
        """This trial with its error; out of memory is an answer that does not fit."""
        if isinstance(error, torch.OutOfMemoryError):
            return replace(self, answer=UNANSWERED, note="out of memory")
        first = (str(error).strip().splitlines() or [""])[0]
        return replace(self, error=f"{type(error).__name__}: {first}")


@dataclass(frozen=True)
class Case:
    """A question behind the last of some windows, each an order of units by name; ``blank`` is its trial
    before it is asked."""

    blank: Trial
    units: Mapping[str, Unit]
    windows: tuple[tuple[str, ...], ...]
    query: ArmQuestion


def trials(
    desk: Desk, case: Case, makers: Mapping[str, Maker], ideal: FirstToken | None = None
) -> Iterator[Trial]:
    """One trial of each arm, the re-prefill first, as the others are compared with it (``ideal`` is its first
    token, if it is not among them). Each arm gets a new adapter; its errors are in its trial, never raised.
    """
    for name in sorted(makers, key=REPREFILL.__ne__):
        trial = replace(case.blank, arm=name)
        try:
            reply, placed, answered = _asked(makers[name](desk), case)
            if name == REPREFILL:
                ideal = FirstToken.of(reply.logits)
            trial = _priced(trial, desk, case, reply)
            yield replace(
                trial,
                answer=reply.text.strip(),  # the benchmarks' own runs strip the text, their scorers need that
                first_token=None if ideal is None else ideal.again(reply.logits),
                ttft_seconds=placed + reply.first_token_seconds,
                answer_seconds=placed + answered,
            )
        except Exception as error:
            yield trial.failed(error)


def _asked(adapter: Adapter, case: Case) -> tuple[Reply, float, float]:
    """The reply behind a trace, the seconds of placing its last window, and those of the whole answer."""
    for unit in case.units.values():
        adapter.encode(unit)
    *before, last = case.windows
    if adapter.rehearsed:
        adapter.place(last)
    for window in before:
        adapter.place(window)
    started = time.perf_counter()
    adapter.place(last)
    placed = time.perf_counter()
    reply = adapter.ask(case.query)
    return reply, placed - started, time.perf_counter() - placed


def _priced(trial: Trial, desk: Desk, case: Case, reply: Reply) -> Trial:
    per_token = desk.backbone.facts.bytes_per_token
    arriving = () if trial.arm == NATIVE else case.query.live  # its window holds them
    live = sum(desk.chunk(unit).num_tokens for unit in arriving)
    inside = desk.tokens([name for name in case.windows[-1] if case.units[name].live])
    question = 0 if trial.arm == NATIVE else desk.backbone.tokenize(case.query.text).shape[0]
    return replace(
        trial,
        window_tokens=reply.window_tokens,
        recomputed_tokens=reply.recomputed_tokens,
        kept_bytes=reply.kept_bytes,
        forwards=reply.forwards,
        question_tokens=question,
        live_tokens=live,
        live_forwards=len(arriving),
        patch_bytes=max(0, reply.kept_bytes - (reply.window_tokens - inside) * per_token),
        kv_bytes=(reply.window_tokens + live) * per_token,
    )
