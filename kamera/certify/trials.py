"""The windows of a scene: one that serves each guarantee, and those it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from kamera.certify.answers import Asked, Instead, Window, answers
from kamera.certify.kv import Compared, Place, Truth, moved_as_said, places
from kamera.certify.metrics import kl
from kamera.certify.probe import TRIALS, Order, ProbeScene, Query
from kamera.certify.sabotage import OF_PHASE, Material, sabotages
from kamera.certify.verdict import Outcome
from kamera.engines.hf import Backbone
from kamera.ops import KV, MOST, Patch
from kamera.store import ChunkStore
from kamera.window import Guarantee, KameraWindow, ReusePolicy

DIVERGENCE = 0.5
"""Largest divergence of antecedents served as "near" here: one chunk of three differs."""

Said = list[tuple[str, torch.Tensor]]
"""The answer to each question, and its next-token logits ``[vocabulary]``."""


class Trials:
    """One scene's chunks, stores and windows. ``policy`` bounds the patches."""

    def __init__(self, backbone: Backbone, scene: ProbeScene, policy: ReusePolicy) -> None:
        self.backbone, self.scene, self.policy = backbone, scene, policy
        self.chunks = [backbone.chunk(content) for content in scene.contents]
        self.store = ChunkStore.open("memory://")
        self.elsewhere = ChunkStore.open("memory://")  # another chunk in the first place

    def ask(self, guarantee: Guarantee, queries: Sequence[Query]) -> list[Outcome]:
        """Ask a window that serves KV of this guarantee, one with its chunks blind, and one prefilled."""
        window = self._served(guarantee)
        worth = window.slots[-1].guarantee
        assert worth == guarantee, f"a window that is to serve {guarantee} KV serves {worth}"
        order = TRIALS[guarantee][1]
        prefilled = self._said(Window(self._prefilled(order)), queries)
        return _outcomes(
            queries,
            prefilled,
            self._said(Window(_blind(window)), queries),
            self._said(Window(window), queries),
        )

    def ask_sabotaged(
        self, queries: Sequence[Query], names: Sequence[str]
    ) -> Iterator[tuple[str, list[Outcome]]]:
        """Ask the questions about patched KV of the KV that these sabotaged builds would serve instead."""
        if not names:
            return
        prefilled = self._said(Window(self._exact), queries)
        blind = self._said(Window(_blind(self._patched)), queries)
        for name in names:
            spans, chunks = self._sabotaged[name], [place.encoded for place in self._places]
            served = Instead(self._patched, chunks, spans)
            yield name, _outcomes(queries, prefilled, blind, self._said(served, queries))

    # -- the KV itself -------------------------------------------------------------------------

    def compared(self) -> Compared:
        """Patched KV as the window shows it."""
        return self._truth.compare(_shown(self._patched))

    def compared_after_moves(self) -> Compared:
        """Patched KV that came back: recalled, and behind chunks that changed places and back."""
        last = len(self._patched) - 1
        window = self._patched.fork()
        chunk_id = window[last].chunk_id
        window.evict(last)
        window.recall(chunk_id)
        found = self._truth.compare(_shown(window))
        turned = [1, 0, *range(2, last + 1)]
        window.reorder(turned)
        window.reorder(turned)
        return found & self._truth.compare(_shown(window))

    def compared_survivors(self) -> Compared:
        """Patched KV that stayed while the first chunk left, or the second: as it was, moved."""
        before = self._patched.shown()
        flaw = ""
        for gone in (0, 1):
            window = self._patched.fork()
            window.evict(gone)
            kept = [i for i in range(len(before)) if i != gone + 1]
            flaw = flaw or moved_as_said(before, window.shown(), kept, self.backbone.layout)
        return Compared(flaw=flaw)

    def compared_sabotaged(self) -> dict[str, Compared]:
        """The KV that each sabotaged build would show. Faults of a patch are looked for in the patch's effect
        alone: a build may take a wrong patch for the stored one."""
        return {name: self._truth.compare(kv, said=name in OF_PHASE) for name, kv in self._sabotaged.items()}

    # -- windows -------------------------------------------------------------------------------

    def _served(self, guarantee: Guarantee) -> KameraWindow:
        before, after = TRIALS[guarantee]
        if guarantee == "patched":
            return self._patched
        if guarantee == "survivor":
            window = self._patched.fork()
            window.slide()
        elif guarantee == "sampled":
            window = self._sampled(self.policy)
            if window.slots[-1].guarantee != "sampled":  # refused: then the most that a sample may run
                window = self._sampled(replace(self.policy, share=MOST, max_error=1.0))
        elif guarantee == "near":
            assert self.stale  # forms the patches behind the other antecedents
            near = replace(self.policy, minimum="near", max_divergence=DIVERGENCE)
            window = self._window(self.elsewhere, after, near)
        else:
            window = self._window(self.store, before, replace(self.policy, minimum="orbit"))
            window.form_orbit(len(before) - 1)
            window.reorder([before.index(i) for i in after])
        return window

    def _sampled(self, policy: ReusePolicy) -> KameraWindow:
        """Chunks prefilled in one order, and sampled in another."""
        before, after = TRIALS["sampled"]
        sampling = replace(policy, minimum="sampled", forms="returning")
        window = self._window(ChunkStore.open("memory://"), before, sampling)
        window.reorder([before.index(i) for i in after])
        return window

    @cached_property
    def _patched(self) -> KameraWindow:
        """All chunks out of the store: the first leads, the others are patched."""
        order = TRIALS["patched"][1]
        self._window(self.store, order)  # prefilled in context, so that their patches are formed
        return self._window(self.store, order)

    @cached_property
    def _exact(self) -> KameraWindow:
        return self._prefilled(TRIALS["patched"][1])

    def _prefilled(self, order: Order) -> KameraWindow:
        """Each chunk prefilled in context; only their vision encodes come from the store."""
        return self._window(self.store, order, ReusePolicy.exact())

    def _window(self, store: ChunkStore, order: Order, policy: ReusePolicy | None = None) -> KameraWindow:
        window = KameraWindow(self.backbone, store, self.scene.system, policy=policy or self.policy)
        for i in order:
            window.append(self.chunks[i])
        return window

    # -- sabotage ------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> list[Place]:
        return places(self._patched, self._exact.position_ids)

    @cached_property
    def _truth(self) -> Truth:
        true = _shown(self._exact)
        return Truth(self._places, true, self.backbone.layout, self.policy.budget)

    @cached_property
    def stale(self) -> dict[str, Patch]:
        """The chunks' patches formed behind another first chunk, by chunk."""
        other = self._window(self.elsewhere, TRIALS["near"][0])
        found = {}
        for slot in other.slots[1:]:
            held = self.elsewhere.get_patch(other.context, slot.chunk_id, slot.antecedents)
            assert held is not None, "it was formed when the chunk was prefilled"
            found[slot.chunk_id] = held.patch.truncate(self.policy.rank)
        return found

    @cached_property
    def _sabotaged(self) -> dict[str, list[KV]]:
        """The KV that each sabotaged build would show for the chunks of the patched window."""
        faults = sabotages(self.backbone.axes)
        shown: dict[str, list[KV]] = {name: [self._places[0].canonical] for name in faults}
        patched = [(place, place.patch) for place in self._places if place.patch is not None]
        for n, (place, patch) in enumerate(patched):
            another = patched[n - 1][1]
            layout, stale = self.backbone.layout, self.stale[place.chunk_id]
            of = Material(place.canonical, patch, layout, place.offset, another, stale, seed=n)
            for name, fault in faults.items():
                shown[name].append(fault(of).served())
        return shown

    def _said(self, asked: Asked, queries: Sequence[Query]) -> Said:
        return list(answers(asked, queries, self.backbone))


def _shown(window: KameraWindow) -> list[KV]:
    """The KV of every chunk, read back from the window's live cache."""
    return [window.kv(i) for i in range(len(window))]


def _blind(window: KameraWindow) -> KameraWindow:
    """The same chunks without their conditioning."""
    blind = window.fork()
    for slot in blind.slots:
        blind.condition(slot, False)
    return blind


def _outcomes(queries: Sequence[Query], prefilled: Said, blind: Said, served: Said) -> list[Outcome]:
    return [
        Outcome(query.answer, ideal, low, high, blind_kl=kl(far, want), served_kl=kl(near, want))
        for query, (ideal, want), (low, far), (high, near) in zip(
            queries, prefilled, blind, served, strict=True
        )
    ]
