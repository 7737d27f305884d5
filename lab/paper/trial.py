"""One window with its questions, asked once of the two arms that every other is judged against."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kamera.certify.metrics import Items, kl_items
from kamera.engines.hf import forwards
from kamera.ops import KV
from kamera.testbed import Question
from lab.arms import Arm, Served
from lab.asking import ask_side_by_side
from lab.metrics import agreement
from lab.repairs import PlainPatch
from lab.scene import Operator, Scene


@dataclass(frozen=True)
class Asked:
    """A question about several pictures; what the re-prefill says is right (``answer`` None)."""

    text: str
    answer: str | None = None
    hops: int = 2


@dataclass(frozen=True, eq=False)
class Judged:
    """What an arm answered: one entry per question in each array, and the price per window.

    ``right`` against the truth, ``agree`` and ``kl`` (nats) against the re-prefill. ``share`` is stored
    bytes over the chunk's own KV bytes, ``share_bf16`` the same had KV and floats been bf16 (codes stay
    what they are); ``tokens`` are recomputed ones.
    """

    right: Items
    agree: Items
    kl: Items
    hops: Items
    nbytes: float
    share: float
    share_bf16: float
    tokens: float
    forwards: float


class Trial:
    """A scene and the questions asked in it; the re-prefill and blind reuse answer once."""

    def __init__(self, scene: Scene, questions: Sequence[Question | Asked]) -> None:
        self.scene = scene
        self.questions = tuple(questions)
        self.ids = [scene.question(q.text) for q in questions]
        self._hops: Items = np.array([q.hops for q in questions], dtype=np.float64)
        self._patched: dict[int, Judged] = {}
        self._places: dict[int, torch.Tensor] = {}

    def under(self, operator: Operator) -> Trial:
        """The same questions of the same scene under another operator; both references are shared."""
        other = copy.copy(self)
        other.scene, other._patched = self.scene.under(operator), {}
        return other

    def answer_id(self, answer: str) -> int:
        """The one token an answer is."""
        return int(self.scene.backbone.builder.tokenize(answer)[0])

    def logits(self, kv: KV, chosen: Sequence[int] | None = None) -> torch.Tensor:
        """Next-token logits ``[questions, vocabulary]`` behind the target's KV ``kv``.

        What `Scene.logits` gives, to rounding, in a forward that copies no cache.
        """
        asked = self.ids if chosen is None else [self.ids[i] for i in chosen]
        for length in {len(ids) for ids in asked} - set(self._places):
            self._places[length] = self.scene.question_positions(length)
        past = forwards.make_cache(self.scene.backbone, [self.scene.context, kv])
        return ask_side_by_side(self.scene.backbone, asked, [self._places[len(ids)] for ids in asked], past)

    @cached_property
    def _answers(self) -> torch.Tensor:
        """The right token of each question."""
        said = self.reference.argmax(-1).cpu().tolist()
        known = [None if q.answer is None else self.answer_id(q.answer) for q in self.questions]
        return torch.tensor([own if right is None else right for own, right in zip(said, known, strict=True)])

    @cached_property
    def reference(self) -> torch.Tensor:
        """The re-prefill's logits, ``[questions, vocabulary]``."""
        return self.logits(self.scene.conditioned)

    @cached_property
    def reprefill(self) -> Judged:
        """The re-prefill judged by itself: its accuracy is the ceiling."""
        served = Served(self.scene.conditioned, 0, float(self.scene.target.num_tokens), 1)
        return self._judged(self.reference, [served])

    @cached_property
    def blind(self) -> Judged:
        """Blind reuse: the floor."""
        return self.judge_kv(self.scene.blind)

    def patched(self, rank: int) -> Judged:
        """The plain patch formed in this window."""
        if rank not in self._patched:
            self._patched[rank] = self.judge(PlainPatch(rank))
        return self._patched[rank]

    def judge(self, arm: Arm) -> Judged:
        """What an arm answers; one that depends on the question is asked the multi-hop ones only."""
        coded = bool(getattr(arm, "coded", False))
        if not arm.per_question:
            served = arm.serve(self.scene)
            return self._judged(self.logits(served.kv), [served], coded=coded)
        chosen = [i for i, hops in enumerate(self._hops) if hops > 1]
        each = [arm.serve(self.scene, self.ids[i]) for i in chosen]
        rows = [self.logits(s.kv, [i]) for s, i in zip(each, chosen, strict=True)]
        return self._judged(torch.cat(rows), each, chosen, coded=coded)

    def judge_kv(self, kv: KV, nbytes: int = 0) -> Judged:
        """What the target's KV ``kv`` answers."""
        return self._judged(self.logits(kv), [Served(kv, nbytes)])

    def _judged(
        self,
        logits: torch.Tensor,
        served: Sequence[Served],
        chosen: Sequence[int] | None = None,
        *,
        coded: bool = False,
    ) -> Judged:
        at = torch.arange(len(self.ids)) if chosen is None else torch.tensor(chosen)
        reference = self.reference[at]
        right: Items = (logits.argmax(-1).cpu() == self._answers[at]).double().numpy()
        nbytes = float(np.mean([s.nbytes for s in served]))
        share = nbytes / self.scene.chunk_bytes
        return Judged(
            right,
            agreement(logits, reference),
            kl_items(logits, reference),
            self._hops[at.numpy()],
            nbytes,
            share,
            share * self.scene.dtype.itemsize / 2 if coded else share,
            float(np.mean([s.tokens_recomputed for s in served])),
            float(np.mean([s.forwards for s in served])),
        )
