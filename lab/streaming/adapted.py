"""A stream kept by an arm of `kamera eval`: the last frames are its window, placed anew at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kamera.content import Chunk
from kamera.eval.adapter import Unit
from kamera.eval.arms import Maker
from kamera.eval.desk import Desk, Placing
from kamera.patches import text_positions


@dataclass
class Adapted:
    """The last ``window`` frames under an arm that `make` gives on a desk without frames.

    ``computed`` are tokens times the share of layers that the arm computed in the last step, the canonical
    included: a partial forward runs whole here, and is counted as the method would run it.
    """

    desk: Desk
    make: Maker
    window: int
    computed: float = 0.0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        arm = self.make(self.desk)
        assert isinstance(arm, Placing), "an arm whose spans can be asked with token ids"
        self.arm = arm

    def see(self, chunk: Chunk) -> None:
        """Encode the frame, place the last ones."""
        name = f"frame {len(self.names)}"
        with self.desk.backbone.measure() as work:
            self.arm.encode(Unit(name, chunk))
        self.names.append(name)
        self.arm.place(self.names[-self.window :])
        self.computed = work.tokens + self.arm.recomputed

    def logits(self, question: torch.Tensor) -> torch.Tensor:
        """Behind the window."""
        assert self.arm.shown is not None, "an arm that places at once"
        desk, live = self.desk, self.arm.live
        facts = [desk.facts[name] for name in self.arm.order]
        live.show([desk.still(desk.anchor.kv), *self.arm.shown], room=question.shape[0])
        positions = text_positions(desk.backbone, desk.anchor.input_ids, facts, question)
        return desk.backbone.ask([question], positions, live)[0][-1]
