"""One model behind one system prompt, and what an arm needs of it: encodings, canonicals, places, answers."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kamera.content import Chunk
from kamera.engines import LiveKV, Span
from kamera.engines.hf import Backbone
from kamera.errors import NotRelocatable
from kamera.eval.adapter import Answer, Parts, Question, Unit
from kamera.ops import KV, Patch, uniform_offset
from kamera.patches import Facts, compact_positions, prefill_anchor, text_positions


@dataclass(frozen=True, eq=False)
class Held:
    """KV of a unit as it was computed at ``positions`` ``[axes, tokens]``."""

    kv: KV
    positions: torch.Tensor


class Desk:
    """Encodes each unit once, computes each canonical once; arms of one item share it.

    ``facts`` and ``chunks`` are the units so far, by name. ``prepared`` is for what arms compute off the
    clock and would compute again for every trace.
    """

    def __init__(self, backbone: Backbone, system: str | None) -> None:
        self.backbone, self.system = backbone, system
        self.anchor = prefill_anchor(backbone, system)
        self.facts: dict[str, Facts] = {}
        self.chunks: dict[str, Chunk] = {}
        self.prepared: dict[Hashable, Any] = {}
        self._canonicals: dict[str, Held] = {}

    def cleared(self) -> Desk:
        """A desk of the same model and anchor without units."""
        other = Desk.__new__(Desk)
        other.backbone, other.system, other.anchor = self.backbone, self.system, self.anchor
        other.facts, other.chunks, other.prepared, other._canonicals = {}, {}, {}, {}
        return other

    def learn(self, unit: Unit) -> None:
        """Encode a unit; one that is known already costs nothing."""
        if unit.name not in self.facts:
            chunk = self._chunk(unit.content)
            self.chunks[unit.name] = chunk
            self.facts[unit.name] = Facts(chunk.id, self.backbone.encode(chunk), chunk.label)

    def canonical(self, name: str) -> Held:
        """KV(unit | anchor), computed once."""
        if name not in self._canonicals:
            (positions,) = self.places([name])
            self._canonicals[name] = self.prefilled(name, positions, self.backbone.live(), [])
        return self._canonicals[name]

    def places(self, order: Sequence[str]) -> list[torch.Tensor]:
        """Positions ``[axes, tokens]`` of units behind the anchor, as the model counts them."""
        return compact_positions(self.backbone, self.anchor.input_ids, [self.facts[n] for n in order])

    def prefilled(self, name: str, positions: torch.Tensor, live: LiveKV, behind: Sequence[Span]) -> Held:
        """One forward of a unit at ``positions`` behind the anchor and ``behind``; ``live`` shows those."""
        facts = self.facts[name]
        live.show([self.anchor_span(), *behind], room=facts.length)
        return Held(self.backbone.prefill(facts.encoded, positions, live), positions)

    def anchor_span(self) -> Span:
        """The anchor at its place."""
        return Span(self.anchor.kv, None, (0,) * self.backbone.axes)

    def moved(self, name: str, held: Held, positions: torch.Tensor, patch: Patch | None = None) -> Span:
        """KV moved to ``positions``, with a patch. Raises NotRelocatable if it does not move as a whole."""
        offset = uniform_offset(held.positions, positions)
        if offset is None:
            raise NotRelocatable(f"unit {name!r} does not move as a whole in this window: leave its item out")
        return Span(held.kv, patch, offset)

    def answer(
        self, order: Sequence[str], spans: Sequence[Span], live: LiveKV, question: Question
    ) -> tuple[str, torch.Tensor, float]:
        """Greedy answer, the first token's logits, and the seconds to them, behind ``spans`` of ``order``.

        Live parts of the question are prefilled behind the spans first.
        """
        arriving = [self._arriving(content) for content in question.live]
        started = time.perf_counter()
        behind, facts = list(spans), [self.facts[name] for name in order]
        for new in arriving:
            facts.append(new)
            positions = compact_positions(self.backbone, self.anchor.input_ids, facts)[-1]
            live.show([self.anchor_span(), *behind], room=new.length)
            kv = self.backbone.prefill(new.encoded, positions, live)
            behind.append(Span(kv, None, (0,) * self.backbone.axes))
        ids = self.backbone.question_ids(question.text, self.anchor.tail)
        positions = text_positions(self.backbone, self.anchor.input_ids, facts, ids)
        live.show([self.anchor_span(), *behind], room=ids.shape[0] + question.max_new_tokens)
        logits = self.backbone.ask(ids, positions, live).cpu()  # on a GPU, time ends when it is here
        seconds = time.perf_counter() - started
        if question.max_new_tokens == 1:
            return self.backbone.detokenize(logits.argmax()[None]) or "", logits, seconds
        places = compact_positions(self.backbone, self.anchor.input_ids, facts)
        made = self.backbone.decode(
            torch.cat([self.anchor.input_ids, *(f.encoded.input_ids for f in facts), ids]),
            torch.cat([self.anchor.positions, *places, positions], dim=1),
            live,
            max_new_tokens=question.max_new_tokens,
            do_sample=False,
        )
        return self.backbone.detokenize(made.tokens[0].cpu()) or "", logits, seconds

    def logits(
        self, order: Sequence[str], spans: Sequence[Span], live: LiveKV, ids: torch.Tensor
    ) -> torch.Tensor:
        """Next-token logits ``[vocabulary]`` after question ids ``[tokens]`` behind ``spans``."""
        facts = [self.facts[name] for name in order]
        live.show([self.anchor_span(), *spans], room=ids.shape[0])
        return self.backbone.ask(ids, text_positions(self.backbone, self.anchor.input_ids, facts, ids), live)

    def tokens(self, order: Sequence[str]) -> int:
        """Tokens of these units."""
        return sum(self.facts[name].length for name in order)

    def _arriving(self, content: Parts | Chunk) -> Facts:
        chunk = self._chunk(content)
        return Facts(chunk.id, self.backbone.encode(chunk), chunk.label)

    def _chunk(self, content: Parts | Chunk) -> Chunk:
        return (
            content if isinstance(content, Chunk) else self.backbone.chunk([dict(part) for part in content])
        )


class Placing:
    """An adapter on a desk: a subclass gives the spans of a window (`spans`), once it is asked about.

    Between two calls of `spans` it may keep what it likes; ``self.recomputed`` (tokens) and ``self.forwards``
    count what it computed since the last `place`, ``self.kept`` the bytes it holds.
    """

    name = ""
    rehearsed = False

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.live = desk.backbone.live()
        self.order: tuple[str, ...] = ()
        self.shown: list[Span] | None = None
        self.recomputed, self.forwards, self.kept = 0.0, 0, 0

    def encode(self, unit: Unit) -> None:
        """Encode the unit."""
        self.desk.learn(unit)

    def place(self, order: Sequence[str]) -> None:
        """The window's spans."""
        self.recomputed, self.forwards = 0.0, 0
        self.order = tuple(order)
        self.shown = self.spans(self.order)

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """Spans of the window's units in this order."""
        raise NotImplementedError

    def ask(self, question: Question) -> Answer:
        """Answer behind the spans."""
        assert self.shown is not None, "place a window first"
        text, logits, seconds = self.desk.answer(self.order, self.shown, self.live, question)
        return Answer(
            *(text, logits, seconds, self.recomputed, self.kept),
            self.desk.tokens(self.order),
            self.forwards,
        )

    def prefilled(self, name: str, positions: torch.Tensor, behind: Sequence[Span]) -> Held:
        """`Desk.prefilled`, counted."""
        self.recomputed += self.desk.facts[name].length
        self.forwards += 1
        return self.desk.prefilled(name, positions, self.live, behind)
