"""The windows that are compared: one document's chunks in one order, served in each way, and prefilled.

All of them show the same tokens at the same positions, so one re-prefill and one blind window serve for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kamera.certify.material import Document
from kamera.certify.metrics import kl
from kamera.content import Chunk
from kamera.engines.hf import HfEngine
from kamera.ops import KV, relocate_kv, uniform_offset
from kamera.store import ChunkStore
from kamera.trust import Guarantee, ReusePolicy, weakest
from kamera.window import KameraWindow, answer_of, keep_orbit, logits_of_answers, shown_spans

ANSWER = 24
"""Tokens of an answer that are judged, at most."""


class Arm(NamedTuple):
    """A window, the guarantee of its weakest slots, and what of their KV's antecedents has departed."""

    guarantee: Guarantee
    departed: float | None
    window: KameraWindow


class Judged(NamedTuple):
    """A window against its re-prefill: KL in nats, share of other likeliest tokens, error of the KV itself.

    The first two are means over the ``tokens`` of all answers; ``kv`` is relative (L2), a root mean square
    over layers and channels; ``alike`` is the mean over answers of the tokens before the first other one.
    """

    tokens: int
    kl: float
    flips: float
    kv: float
    alike: float


class Trial:
    """One document on one engine. ``policy`` bounds the patches."""

    def __init__(self, engine: HfEngine, document: Document, policy: ReusePolicy, system: str | None) -> None:
        self._engine, self._policy, self._system = engine, policy, system
        self._leaving, self._chunks = (
            [engine.chunk(content) for content in contents]
            for contents in (document.leaving, document.staying)
        )
        self._store = ChunkStore.open("memory://")
        true = self._window(self._store, self._chunks, ReusePolicy.exact())
        self._answers = [(q, answer_of(true, q, max_new_tokens=ANSWER)) for q in document.questions]
        self._reference, self._true = logits_of_answers(true, self._answers), shown_spans(true)[1:]

    def arms(self, guarantees: Sequence[Guarantee]) -> Iterator[Arm]:
        """The window in every way of these guarantees; the blind one is always among them, and last.

        What is formed for one must not serve in another's place: so survivors come first and patches last.
        """
        if "survivor" in guarantees:
            for count in sorted({1, 2, len(self._leaving)} & {*range(len(self._leaving) + 1)}):
                yield self._survivor(count)
        if "near" in guarantees:
            yield self._near()
        if "orbit" in guarantees:
            yield self._orbit()
        patched = self._reused("patched", self._store, self._chunks)
        if "patched" in guarantees:
            yield Arm("patched", None, patched)
        blind = patched.fork()
        for slot in blind.slots:
            blind.condition(slot, False)
        yield Arm("blind", None, blind)

    def judge(self, window: KameraWindow) -> Judged:
        """A window's distributions over the tokens of the re-prefill's answers, and its KV, against both."""
        served, true = logits_of_answers(window, self._answers), self._reference
        flips = [a.argmax(-1) != b.argmax(-1) for a, b in zip(served, true, strict=True)]
        # until its first other token an answer of its own would have said the same
        alike = [int(one.int().argmax()) if one.any() else len(one) for one in flips]
        lost, changed = float(kl(torch.cat(served), torch.cat(true)).mean()), torch.cat(flips).double()
        kv = self._kv_error(window)
        return Judged(len(changed), lost, float(changed.mean()), kv, sum(alike) / len(alike))

    # -- windows -------------------------------------------------------------------------------------

    def _survivor(self, count: int) -> Arm:
        front = self._leaving[-count:]
        policy = replace(self._policy, on_miss="prefill", on_leave="keep")
        window = self._window(self._store, [*front, *self._chunks], policy)
        window.slide(count)
        kept = [slot for slot in window.slots if slot.guarantee == "survivor"]
        lost = sum(slot.length * slot.departed for slot in kept)
        return Arm("survivor", lost / sum(slot.length for slot in kept), window)

    def _near(self) -> Arm:
        store, other = ChunkStore.open("memory://"), [self._leaving[-1], *self._chunks[1:]]
        self._reused("patched", store, other)
        self._window(store, self._chunks[:1], self._policy)
        policy = replace(self._policy, minimum="near", max_divergence=1.0, on_miss="prefill")
        window = self._window(store, self._chunks, policy)
        _check(window, "near")
        lost = [2 / (i + 1) for i, slot in enumerate(window.slots) if slot.guarantee == "near"]
        return Arm("near", sum(lost) / len(lost), window)

    def _orbit(self) -> Arm:
        window = self._window(self._store, self._chunks, replace(self._policy, on_miss="prefill"))
        for slot in window.slots[1:]:
            keep_orbit(window, slot)
        return Arm("orbit", None, self._reused("orbit", self._store, self._chunks))

    def _reused(self, guarantee: Guarantee, store: ChunkStore, chunks: Sequence[Chunk]) -> KameraWindow:
        """The chunks out of the store: a first window runs what is missing there."""
        policy = replace(self._policy, minimum=guarantee, on_miss="form", forms="always")
        for _ in range(2):
            window = self._window(store, chunks, policy)
        _check(window, guarantee)
        return window

    def _window(self, store: ChunkStore, chunks: Sequence[Chunk], policy: ReusePolicy) -> KameraWindow:
        window = KameraWindow(self._engine, store, self._system, policy=policy)
        for chunk in chunks:
            window.append(chunk)
        window.flush()
        return window

    def _kv_error(self, window: KameraWindow) -> float:
        turned = []
        for span, true in zip(shown_spans(window)[1:], self._true, strict=True):
            # the live cache of a window that slid may begin at another place: that is no error
            offset = uniform_offset(span.positions, true.positions)
            assert offset is not None, "the same chunks in the same order stand alike"
            turned.append(relocate_kv(span.kv, self._engine.layout, offset))
        return kv_error(turned, [span.kv for span in self._true])


def kv_error(served: Sequence[KV], true: Sequence[KV]) -> float:
    """Relative L2 error of some chunks' KV, a root mean square over layers and channels."""
    off, whole = dict[tuple[int, str], torch.Tensor](), dict[tuple[int, str], torch.Tensor]()
    for ours, want in zip(served, true, strict=True):
        for group, (a, b) in enumerate(zip(ours.parts, want.parts, strict=True)):
            for name, x in b.items():  # [layers, heads, tokens, dim]
                for sums, values in ((off, a[name].double() - x.double()), (whole, x.double())):
                    key, energy = (group, name), values.square().sum((1, 2, 3))
                    sums[key] = sums[key] + energy if key in sums else energy
    return float(torch.cat([off[key] / whole[key] for key in off]).mean().sqrt())


def _check(window: KameraWindow, guarantee: Guarantee) -> None:
    worth = weakest(slot.guarantee for slot in window.slots)
    assert worth == guarantee, f"a window that is to serve {guarantee} KV serves {worth}"
