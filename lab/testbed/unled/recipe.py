"""A step's windows and its loss: next-token cross-entropy of captions, short and full questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from kamera.testbed.world import TRAINING_SEEDS, Episode

from ..families import Family
from ..frontend import SYSTEM_PROMPTS
from ..scoring import decode
from .attention import RowAttention
from .rows import Packed, Rows, captions, lay_out, questions
from .schedule import Phase, Schedule
from .windows import episode

CAPTIONS = {"items": 30, "legend": 8, "page": 40, "rename": 8}
"""Lines of a caption, by the kind of its frame."""
SHORT = {"value": (8, 4), "glyph": (0, 2), "colour": (0, 3)}
FULL = {"value": (7, 4), "glyph": (2, 1), "colour": (2, 3)}
"""Questions of each kind: behind the frames that hold the answer only, and with everything in view."""
ORDER = 2
"""Questions of each kind about the order of frames, where two legends have one."""
WEIGHTS = {"captions": 1.0, "short": 1.0, "full": 1.0, "order": 0.3}
"""Of the means that make the loss."""
SMOOTHING = 0.02


class Recipe:
    """Draws a step's batch from the schedule's seed and the step alone, so that a run can be resumed."""

    def __init__(
        self, family: Family, model: Any, tokenizer: PreTrainedTokenizerBase, schedule: Schedule
    ) -> None:
        self.family, self.model, self.tokenizer, self.schedule = family, model, tokenizer, schedule
        self.attention = RowAttention(model.model.language_model)

    def draw(self, step: int, phase: Phase) -> Packed:
        """The batch of a step: windows of one layout, as many as the step's tokens allow."""
        rng = np.random.default_rng([TRAINING_SEEDS, self.schedule.seed, step])
        weights = np.array([weight for _, weight in phase.layouts])
        layout = phase.layouts[rng.choice(len(weights), p=weights / weights.sum())][0]
        system = SYSTEM_PROMPTS[rng.integers(len(SYSTEM_PROMPTS))]
        probe = self._pack([episode(rng, layout, phase.size)], system, rng, phase.order)
        count = max(self.schedule.least, round(self.schedule.tokens / probe.batch.input_ids.shape[1]))
        episodes = [episode(rng, layout, phase.size) for _ in range(count)]
        return self._pack(episodes, system, rng, phase.order)

    def _pack(
        self, episodes: Sequence[Episode], system: str, rng: np.random.Generator, order: Sequence[str]
    ) -> Packed:
        frames = episodes[0].frames
        everything = tuple(range(len(frames)))
        items = tuple(i for i in everything if frames[i].shows_items)
        legends = tuple(i for i in everything if frames[i].kind == "legend")
        rows: list[Rows] = [
            captions(self.tokenizer, episodes, i, CAPTIONS[frame.kind], rng)
            for i, frame in enumerate(frames)
            if frame.kind in CAPTIONS
        ]
        for name, counts in (("short", SHORT), ("full", FULL)):
            for kind, (evicted, full) in counts.items():
                holders = legends if kind == "colour" else items
                for count, sees in ((evicted, holders), (full, everything)):
                    if count and holders:
                        rows.append(questions(self.tokenizer, episodes, kind, count, sees, rng, name=name))
        for kind in order:
            if all(one.subjects([kind]) for one in episodes) and len(legends) > 1:
                rows.append(questions(self.tokenizer, episodes, kind, ORDER, everything, rng, name="order"))
        return lay_out(self.family, self.model, self.tokenizer, episodes, rows, system)

    def loss(self, packed: Packed, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        """The weighted sum of the means over captions and each form of questions, and these parts."""
        self.attention.shape = packed.shape
        hidden = decode(self.family, self.model, packed.batch, packed.batch.mask, generator)
        self.attention.shape = None
        parts = {}
        for name, target in packed.targets.items():
            told = target >= 0
            logits = self.model.lm_head(hidden[told])
            parts[name] = F.cross_entropy(logits, target[told], label_smoothing=SMOOTHING)
        whole = torch.stack([WEIGHTS[name] * part for name, part in parts.items()]).sum()
        return whole, {name: float(part.detach()) for name, part in parts.items()}
