"""Kamera's ways to keep the same stream: exact, survivors, repair, and recall by the question."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.content import Chunk
from kamera.engines.hf import HfEngine
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
        branch.recall(question=question)
        return branch.next_token_logits(question)
