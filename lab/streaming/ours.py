"""Kamera's ways to keep the same stream: exact, survivors, repair, and recall by the question."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.content import Chunk
from kamera.engines import Span
from kamera.engines.hf import HfEngine
from kamera.patches import await_archives, text_positions
from kamera.trust import OnLeave
from kamera.window import Arrange


@dataclass
class Windowed:
    """A window of ``window`` frames; ``on_leave`` says what becomes of those behind the one that leaves."""

    backbone: HfEngine
    window: int
    on_leave: OnLeave
    recalls: bool = False
    kept: KameraWindow = field(init=False)

    def __post_init__(self) -> None:
        policy = ReusePolicy(minimum="exact" if self.on_leave == "exact" else "patched", certified=False)
        store = ChunkStore.open("memory://")
        self.kept = KameraWindow(self.backbone, store, testbed.SYSTEM, policy=policy)

    def see(self, chunk: Chunk) -> None:
        """Slide where the window is full, then append."""
        if len(self.kept) == self.window:
            if self.on_leave == "repair":
                self.kept.run(Arrange(self.kept.slots[1:], on_leave="repair"))
            else:
                self.kept.slide()
        self.kept.append(chunk)

    def logits(self, question: torch.Tensor) -> torch.Tensor:
        """Behind the window, or behind a fork of it into which the question recalled a frame."""
        if not self.recalls:
            return self.kept.next_token_logits(question)
        branch = self.kept.fork()
        branch.recall(answering(branch, question))
        return branch.next_token_logits(question)


def answering(window: KameraWindow, question: torch.Tensor) -> str:
    """The id of the archived chunk behind which, alone, the first token of an answer is most certain."""
    former = window._stage.former
    await_archives(former)
    backbone, behind, sure = former.backbone, former.backbone.live(), dict[str, float]()
    with former.operation():
        for row in former.store.ls("canonical", context=former.context):
            facts = former.facts_of(row.chunk_id)
            span = Span(former.canonical(facts).kv, None, (0,) * backbone.axes)
            behind.show([former.anchor_span, span], room=question.shape[0])
            places = text_positions(backbone, former.anchor.input_ids, [facts], question)
            logits = backbone.ask([question], places, behind)[0][-1]
            sure[row.chunk_id] = float(logits.float().softmax(-1).max())
    return max(sure, key=lambda chunk_id: sure[chunk_id])
