"""The windows of a scene: one that serves each guarantee, and those it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import torch

from kamera.certify.kv import KVComparison, Truth, error_of_move, spans_of
from kamera.certify.metrics import kl
from kamera.certify.probe import TRIALS, Order, ProbeScene, Query
from kamera.certify.sabotage import SABOTAGES, Material
from kamera.certify.verdict import QuestionOutcome
from kamera.engines.hf import HfEngine
from kamera.ops import KV, MOST, Patch
from kamera.store import ChunkStore
from kamera.trust import Guarantee, ReusePolicy
from kamera.window import (
    KameraWindow,
    former_of,
    keep_orbit,
    next_token_logits_of,
    sequence_of,
    shown_spans,
    with_kv,
)

ANSWER_TOKENS = 12
"""An answer is one word; this leaves room for "The answer is …"."""

DIVERGENCE = 0.5
"""Largest divergence of antecedents served as "near" here: one chunk of three differs."""


class Trials:
    """One scene's chunks, stores and windows. ``policy`` bounds the patches."""

    def __init__(self, backbone: HfEngine, scene: ProbeScene, policy: ReusePolicy) -> None:
        self.backbone, self.scene, self.policy = backbone, scene, policy
        self.chunks = [backbone.chunk(content) for content in scene.contents]
        self.store = ChunkStore.open("memory://")
        self.elsewhere = ChunkStore.open("memory://")  # another chunk in the first place

    def ask(
        self, guarantee: Guarantee, queries: Sequence[Query], faults: Sequence[str] = ()
    ) -> dict[str, list[QuestionOutcome]]:
        """Ask a window that serves KV of this guarantee, one with its chunks blind, and one prefilled.

        Of patched KV what builds with these ``faults`` would serve instead is asked, too. The outcomes are by
        guarantee and fault.
        """
        window = self._window_of(guarantee)
        worth = window.slots[-1].guarantee
        assert worth == guarantee, f"a window that is to serve {guarantee} KV serves {worth}"
        truths = _answers(self._prefill(TRIALS[guarantee][1]), queries)
        blind, made = window.fork(), dict[str, list[QuestionOutcome]]()
        for slot in blind.slots:
            blind.condition(slot, False)
        blinds = _answers(blind, queries)
        wrong = ((name, with_kv(window, self._sabotaged_kv(name))) for name in faults)
        for name, asked in chain([(guarantee, window)], wrong):
            rows = zip(queries, truths, blinds, _answers(asked, queries), strict=True)
            made[name] = [
                QuestionOutcome(query.answer, ideal, low, high, kl(far, want), kl(near, want))
                for query, (ideal, want), (low, far), (high, near) in rows
            ]
        return made

    # -- the KV itself -------------------------------------------------------------------------

    def compare(self) -> KVComparison:
        """Patched KV as the window shows it."""
        return self._truth.compare(_live_kv(self._patched_window))

    def compare_after_moves(self) -> KVComparison:
        """Patched KV that came back: recalled, and behind chunks that changed places and back."""
        last = len(self._patched_window) - 1
        window = self._patched_window.fork()
        chunk_id = window[last].chunk_id
        window.evict(last)
        window.recall(chunk_id)
        found = self._truth.compare(_live_kv(window))
        turned = [1, 0, *range(2, last + 1)]
        window.reorder(turned)
        window.reorder(turned)
        return found & self._truth.compare(_live_kv(window))

    def compare_survivors(self) -> KVComparison:
        """Patched KV that stayed while the first chunk left, or the second: as it was, moved."""
        before = shown_spans(self._patched_window)
        flaw = ""
        for gone in (0, 1):
            window = self._patched_window.fork()
            window.evict(gone)
            kept = [i for i in range(len(before)) if i != gone + 1]
            flaw = flaw or error_of_move(before, shown_spans(window), kept, self.backbone.layout)
        return KVComparison(flaw=flaw)

    def compare_sabotage(self, name: str) -> KVComparison:
        """The KV that a sabotaged build would show. Faults of a patch are looked for in the patch's effect
        alone: a build may take a wrong patch for the stored one."""
        return self._truth.compare(self._sabotaged_kv(name), said=not SABOTAGES[name].patch)

    # -- windows -------------------------------------------------------------------------------

    def _window_of(self, guarantee: Guarantee) -> KameraWindow:
        before, after = TRIALS[guarantee]
        if guarantee == "patched":
            return self._patched_window
        if guarantee == "survivor":
            window = self._patched_window.fork()
            window.slide()
        elif guarantee == "sampled":
            window = self._sample(self.policy)
            if window.slots[-1].guarantee != "sampled":  # refused: then the most that a sample may run
                window = self._sample(replace(self.policy, share=MOST, max_error=1.0))
        elif guarantee == "near":
            assert self.stale_patches  # forms the patches behind the other antecedents
            near = replace(self.policy, minimum="near", max_divergence=DIVERGENCE)
            window = self._window(self.elsewhere, after, near)
        else:
            window = self._window(self.store, before, replace(self.policy, minimum="orbit"))
            keep_orbit(window, len(before) - 1)
            window.reorder([before.index(i) for i in after])
        return window

    def _sample(self, policy: ReusePolicy) -> KameraWindow:
        """Chunks prefilled in one order, and sampled in another."""
        before, after = TRIALS["sampled"]
        sampling = replace(policy, minimum="sampled", forms="returning")
        window = self._window(ChunkStore.open("memory://"), before, sampling)
        window.reorder([before.index(i) for i in after])
        return window

    @cached_property
    def _patched_window(self) -> KameraWindow:
        """All chunks out of the store: the first leads, the others are patched."""
        order = TRIALS["patched"][1]
        self._window(self.store, order)  # prefilled in context, so that their patches are formed
        return self._window(self.store, order)

    @cached_property
    def _exact_window(self) -> KameraWindow:
        return self._prefill(TRIALS["patched"][1])

    def _prefill(self, order: Order) -> KameraWindow:
        """Each chunk prefilled in context; only their vision encodes come from the store."""
        return self._window(self.store, order, ReusePolicy.exact())

    def _window(self, store: ChunkStore, order: Order, policy: ReusePolicy | None = None) -> KameraWindow:
        window = KameraWindow(self.backbone, store, self.scene.system, policy=policy or self.policy)
        for i in order:
            window.append(self.chunks[i])
        return window

    # -- sabotage ------------------------------------------------------------------------------

    @cached_property
    def _truth(self) -> Truth:
        spans = spans_of(self._patched_window, sequence_of(self._exact_window).position_ids)
        return Truth(spans, _live_kv(self._exact_window), self.backbone.layout, self.policy.budget)

    @cached_property
    def stale_patches(self) -> dict[str, Patch]:
        """The chunks' patches formed behind another first chunk, by chunk."""
        other = self._window(self.elsewhere, TRIALS["near"][0])
        found = {}
        for slot in other.slots[1:]:
            record = self.elsewhere.get_patch(former_of(other).context, slot.chunk_id, slot.antecedents)
            assert record is not None, "it was formed when the chunk was prefilled"
            found[slot.chunk_id] = record.patch.truncate(self.policy.rank)
        return found

    def _sabotaged_kv(self, name: str) -> list[KV]:
        """The KV that a sabotaged build would show for the chunks of the patched window."""
        spans, layout = self._truth.spans, self.backbone.layout
        placed = zip(self._patched_window.slots, spans, strict=True)
        patched = [(slot.chunk_id, span, span.patch) for slot, span in placed if span.patch is not None]
        shown = [spans[0].kv]
        for n, (chunk_id, span, patch) in enumerate(patched):
            another, stale = patched[n - 1][2], self.stale_patches[chunk_id]
            of = Material(span.kv, patch, layout, span.offset, another, stale, seed=n)
            shown.append(of.under(SABOTAGES[name]).served_kv())
        return shown


def _live_kv(window: KameraWindow) -> list[KV]:
    """The KV of every chunk, read back from the window's live cache."""
    return [span.kv for span in shown_spans(window)[1:]]


def _answers(window: KameraWindow, queries: Sequence[Query]) -> list[tuple[str, torch.Tensor]]:
    """The answer to each question ("" for none of its options), and the next-token logits ``[vocabulary]``.

    The likeliest next token is the answer if it names an option; else the model generates words.
    """
    backbone, made = former_of(window).backbone, []
    rows = next_token_logits_of(window, [query.text for query in queries])
    for query, row in zip(queries, rows, strict=True):
        answer = query.read(backbone.builder.detokenize(row.argmax()[None].cpu()) or "")
        words = "" if answer else window.generate(query.text, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        made.append((answer or query.read(str(words)), row))
    return made
