"""Ways to keep a stream in view that are not Kamera's, each in its strongest form.

``recent@N`` prefills the last N frames anew (the bar in streaming video). ``streaming_vlm@W`` keeps the KV of
the last W frames behind the system prompt as it was computed, and turns it to contiguous positions at every
step (StreamingVLM); ``appended@W`` is the same with positions that only grow. ``rekv@k`` keeps the KV of
every frame and attends to the k that the question itself attends to most (ReKV), in the order of time, at
contiguous positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kamera.content import Chunk, Encoded
from kamera.engines import Span
from kamera.engines.hf import HfEngine, forwards
from kamera.ops import KV, relocate_kv, uniform_offset
from kamera.patches import Anchor
from lab.attention import attention_mass


class Keeper(Protocol):
    """Something that sees a stream and is asked about it."""

    def see(self, chunk: Chunk) -> None:
        """The next frame."""

    def logits(self, question: torch.Tensor) -> torch.Tensor:
        """Next-token logits ``[vocabulary]`` after the question's token ids ``[tokens]``."""


@dataclass(frozen=True, eq=False)
class Held:
    """A frame's KV at ``positions`` ``[axes, tokens]``."""

    encoded: Encoded
    kv: KV
    positions: torch.Tensor


@dataclass
class Recent:
    """The last ``window`` frames encoded and prefilled at every step."""

    backbone: HfEngine
    anchor: Anchor
    window: int
    chunks: list[Chunk] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def see(self, chunk: Chunk) -> None:
        """Prefill the window from pixels."""
        self.chunks = [*self.chunks, chunk][-self.window :]
        self.held = []
        for item in self.chunks:
            encoded = self.backbone.encode(item)
            self.held.append(prefilled(self.backbone, self.anchor, self.held, encoded))

    def logits(self, question: torch.Tensor) -> torch.Tensor:
        """Behind the window."""
        return asked(self.backbone, self.anchor, self.held, question)


@dataclass
class Streaming:
    """The KV of the last ``window`` frames, never repaired.

    ``contiguous`` says whether positions close up when a frame leaves.
    """

    backbone: HfEngine
    anchor: Anchor
    window: int
    contiguous: bool = True
    held: list[Held] = field(default_factory=list)
    every: list[Held] = field(default_factory=list)

    def see(self, chunk: Chunk) -> None:
        """Drop the oldest, turn the others, prefill the new one behind them."""
        if len(self.held) == self.window:
            self.held = self.held[1:]
            if self.contiguous:
                self.held = _closed_up(self.backbone, self.anchor, self.held)
        encoded = self.backbone.encode(chunk)
        self.held.append(prefilled(self.backbone, self.anchor, self.held, encoded))
        self.every.append(self.held[-1])

    def logits(self, question: torch.Tensor) -> torch.Tensor:
        """Behind the window."""
        return asked(self.backbone, self.anchor, self.held, question)


@dataclass
class ReKV:
    """Every frame's KV is kept; a question attends to the ``count`` frames it looks at most."""

    stream: Streaming
    count: int

    def see(self, chunk: Chunk) -> None:
        """As `Streaming`, keeping what leaves."""
        self.stream.see(chunk)

    def logits(self, question: torch.Tensor) -> torch.Tensor:
        """Behind the frames that the question's own attention, summed over layers, chooses."""
        backbone, anchor = self.stream.backbone, self.stream.anchor
        every = _closed_up(backbone, anchor, self.stream.every)
        past = forwards.make_cache(backbone, [anchor.kv, *(held.kv for held in every)])
        masses = attention_mass(backbone, question, behind(anchor, every, question), past)
        lengths = [anchor.length, *(held.positions.shape[1] for held in every)]
        mass = torch.stack([layer for layer in masses if layer.numel()]).sum(0).split(lengths)[1:]
        best = torch.stack([m.sum() for m in mass]).topk(min(self.count, len(every))).indices.tolist()
        chosen = _closed_up(backbone, anchor, [self.stream.every[i] for i in sorted(best)])
        return asked(backbone, anchor, chosen, question)


def _next(anchor: Anchor, held: Sequence[Held]) -> int:
    """The position of what comes behind: one past the highest so far."""
    last = held[-1].positions if held else anchor.positions
    return int(last.max()) + 1 if last.numel() else 0


def prefilled(backbone: HfEngine, anchor: Anchor, held: Sequence[Held], encoded: Encoded) -> Held:
    """A frame prefilled behind ``held``, one past the highest position so far."""
    alone = backbone.positions([encoded.input_ids], [encoded.position_inputs])
    positions = alone + _next(anchor, held)
    live = backbone.live()
    still = (0,) * backbone.axes
    spans = [Span(kv, None, still) for kv in (anchor.kv, *(item.kv for item in held))]
    live.show(spans, room=alone.shape[1])
    return Held(encoded, backbone.prefill([encoded], [positions], live)[0], positions)


def _closed_up(backbone: HfEngine, anchor: Anchor, held: list[Held]) -> list[Held]:
    """The same KV, turned to positions without gaps."""
    closed: list[Held] = []
    for item in held:
        alone = backbone.positions([item.encoded.input_ids], [item.encoded.position_inputs])
        positions = alone + _next(anchor, closed)
        offset = uniform_offset(item.positions, positions)
        assert offset is not None, "a frame moves as a whole"
        closed.append(Held(item.encoded, relocate_kv(item.kv, backbone.layout, offset), positions))
    return closed


def behind(anchor: Anchor, held: Sequence[Held], question: torch.Tensor) -> torch.Tensor:
    """Positions ``[axes, tokens]`` of a question's tokens behind ``held``."""
    start = _next(anchor, held)
    return torch.arange(start, start + question.shape[0]).expand(anchor.positions.shape[0], -1)


def asked(backbone: HfEngine, anchor: Anchor, held: Sequence[Held], question: torch.Tensor) -> torch.Tensor:
    """Next-token logits ``[vocabulary]`` of a question behind ``held``."""
    past = forwards.make_cache(backbone, [anchor.kv, *(item.kv for item in held)])
    return forwards.forward(backbone, question, behind(anchor, held, question), past)
