"""Erasure by learned states, in the style of KVEraser (arXiv:2606.17034).

A frame that leaves stays in the cache as *steering states*: an affine map of its own KV, one for each layer
and channel, trained so that answers behind [anchor, steering states, survivors] are those of a window that
never saw the frame. Nothing else in the cache changes: positions only grow, and erased intervals stay.

In its strongest form: the maps are trained on the testbed's own world, on windows like those of the stream
(other episodes), with the questions that the stream asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange

from kamera import testbed
from kamera.content import Chunk
from kamera.engines.hf import HfEngine, forwards
from kamera.engines.hf.encode import with_batch
from kamera.ops import KV, Layout, kv_of, relocate_kv
from kamera.patches import Anchor
from lab.streaming.rivals import Held, asked, behind, prefilled
from lab.streaming.stream import FRAMES, questions

TRAINED_ON = 975_000
"""Seed of the episodes: neither the stream's nor the backbones' own."""

SAMPLES, EPOCHS, RATE = 48, 6, 2e-3
MOST = 4
"""Questions of each kind a sample asks."""


@dataclass(eq=False)
class Eraser:
    """Affine maps of a frame's KV in its own frame of positions: weights ``[features, features]``, biases."""

    layout: Layout
    maps: list[dict[str, tuple[torch.Tensor, torch.Tensor]]]

    @classmethod
    def idle(cls, layout: Layout) -> Eraser:
        """Maps that change nothing: the frame stays as it is."""
        return cls(
            layout,
            [
                {
                    c.name: (torch.zeros(c.features, c.features), torch.zeros(c.features))
                    for c in spec.channels
                }
                for spec in layout
            ],
        )

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All weights and biases."""
        return [t for layer in self.maps for pair in layer.values() for t in pair]

    def steering(self, held: Held) -> KV:
        """Steering states at the frame's own place."""
        start = [int(p) for p in held.positions[:, 0]]
        alone = relocate_kv(held.kv, self.layout, [-p for p in start])
        steered = []
        for layer, maps in zip(alone, self.maps, strict=True):
            mapped = {}
            for name, tensor in layer.items():
                weight, bias = maps[name]
                flat = rearrange(tensor, "heads tokens dim -> tokens (heads dim)")
                moved = flat + flat @ weight + bias
                mapped[name] = rearrange(
                    moved, "tokens (heads dim) -> heads tokens dim", heads=tensor.shape[0]
                )
            steered.append(mapped)
        return relocate_kv(kv_of(steered, alone.groups), self.layout, start)


@dataclass(frozen=True, eq=False)
class Sample:
    """A frame, its survivors as they were computed behind it, questions, and the answers without it."""

    left: Held
    survivors: list[Held]
    asked: list[torch.Tensor]
    wanted: torch.Tensor


def train(
    backbone: HfEngine, anchor: Anchor, window: int, samples: int = SAMPLES, epochs: int = EPOCHS
) -> tuple[Eraser, list[float]]:
    """An eraser for windows of ``window`` frames, and the mean KL of each epoch."""
    drawn = list(_samples(backbone, anchor, window, samples))
    eraser = Eraser.idle(backbone.layout)
    for parameter in eraser.parameters:
        parameter.requires_grad_()
    steps = torch.optim.Adam(eraser.parameters, lr=RATE)
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for index in np.random.default_rng([TRAINED_ON, epoch]).permutation(len(drawn)).tolist():
            loss = _loss(backbone, anchor, eraser, drawn[index])
            steps.zero_grad()
            for parameter, slope in zip(
                eraser.parameters,
                torch.autograd.grad(loss, eraser.parameters, allow_unused=True),
                strict=True,
            ):
                parameter.grad = slope  # the backbone's own weights get none
            steps.step()
            total += float(loss.detach())
        losses.append(total / len(drawn))
    for parameter in eraser.parameters:
        parameter.requires_grad_(False)
    return eraser, losses


def _samples(backbone: HfEngine, anchor: Anchor, window: int, count: int) -> Iterator[Sample]:
    index = 0
    while count:
        layout = FRAMES[index % len(FRAMES)]
        episode = testbed.World(TRAINED_ON).episode(index, layout=layout)
        start = index % (len(layout) - window)
        index += 1
        # the stream's own questions, at the moment when the first of window + 1 frames has left
        found = questions(episode, start + window + 1, window, MOST, TRAINED_ON)
        texts = [question.text for question in found if question.kind != "left"]
        if not texts:
            continue
        encoded = [
            backbone.encode(backbone.chunk(frame.content))
            for frame in episode.frames[start : start + window + 1]
        ]
        seen: list[Held] = []
        alone: list[Held] = []
        for frame in encoded:
            seen.append(prefilled(backbone, anchor, seen, frame))
        for frame in encoded[1:]:
            alone.append(prefilled(backbone, anchor, alone, frame))
        ids = [backbone.builder.tokenize(text + anchor.tail) for text in texts]
        wanted = torch.stack([asked(backbone, anchor, alone, one) for one in ids])
        yield Sample(seen[0], seen[1:], ids, wanted)
        count -= 1


def _loss(backbone: HfEngine, anchor: Anchor, eraser: Eraser, sample: Sample) -> torch.Tensor:
    """Mean KL(without the frame ‖ behind the steering states) over the sample's questions."""
    held = [Held(sample.left.encoded, eraser.steering(sample.left), sample.left.positions), *sample.survivors]
    losses = []
    for ids, wanted in zip(sample.asked, sample.wanted, strict=True):
        past = forwards.make_cache(backbone, [anchor.kv, *(item.kv for item in held)])
        said = backbone.model(
            input_ids=ids[None],
            position_ids=with_batch(behind(anchor, held, ids)),
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        ).logits[0, -1]
        p, q = torch.log_softmax(wanted, -1), torch.log_softmax(said, -1)
        losses.append((p.exp() * (p - q)).sum())
    return torch.stack(losses).mean()


@dataclass
class Erased:
    """Every frame stays in the cache: the last ``window`` as computed, the others as steering states."""

    backbone: HfEngine
    anchor: Anchor
    window: int
    eraser: Eraser
    gone: list[Held] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def see(self, chunk: Chunk) -> None:
        """Erase the oldest in view where the window is full, prefill the new one behind all."""
        if len(self.held) == self.window:
            left = self.held.pop(0)
            self.gone.append(Held(left.encoded, self.eraser.steering(left), left.positions))
        encoded = self.backbone.encode(chunk)
        self.held.append(prefilled(self.backbone, self.anchor, self.every, encoded))

    @property
    def every(self) -> Sequence[Held]:
        """All that the cache holds."""
        return [*self.gone, *self.held]

    def logits(self, question: torch.Tensor) -> torch.Tensor:
        """Behind all."""
        return asked(self.backbone, self.anchor, self.every, question)
