"""One model behind one system prompt, and what an arm needs of it: encodings, canonicals, places, answers."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from kamera.content import Chunk, Encoded
from kamera.engines import LiveKV, Span
from kamera.engines.hf import HfEngine
from kamera.errors import NotRelocatable
from kamera.eval.adapter import ArmQuestion, Reply, Unit
from kamera.ops import KV, Patch, uniform_offset
from kamera.patches import Anchor, compact_positions, prefill_anchor, text_positions


class Desk:
    """Encodes each unit once, computes each canonical once; arms of one item share it.

    Arms on it place KV by themselves: a re-prefill by a `KameraWindow` would share the faults of the windows
    that are compared with it.

    ``anchor`` is that of ``system``, if it was run before. ``units``, ``chunks`` and ``encoded`` are those so
    far, by name of the unit. ``prepared`` is for what arms compute off the clock and would compute again for
    every trace.
    """

    def __init__(self, backbone: HfEngine, system: str | None, anchor: Anchor | None = None) -> None:
        self.backbone, self.system = backbone, system
        self.anchor = anchor or prefill_anchor(backbone, system)
        self.units: dict[str, Unit] = {}
        self.chunks: dict[str, Chunk] = {}
        self.encoded: dict[str, Encoded] = {}
        self.prepared: dict[Hashable, Any] = {}
        self._canonicals: dict[str, Span] = {}

    def chunk(self, unit: Unit) -> Chunk:
        """The unit's chunk, processed once."""
        if unit.name not in self.chunks:
            made = unit.content
            chunk = made if isinstance(made, Chunk) else self.backbone.chunk([dict(part) for part in made])
            self.units[unit.name], self.chunks[unit.name] = unit, chunk
        return self.chunks[unit.name]

    def encode_once(self, unit: Unit) -> None:
        """Encode a unit; one that is known already costs nothing."""
        chunk = self.chunk(unit)
        if unit.name not in self.encoded:
            self.encoded[unit.name] = self.backbone.encode(chunk)

    def canonical(self, name: str) -> Span:
        """KV(unit | anchor), computed once."""
        if name not in self._canonicals:
            (positions,) = self.places([name])
            self._canonicals[name] = self.prefill(name, positions, self.backbone.live(), [])
        return self._canonicals[name]

    def places(self, order: Sequence[str]) -> list[torch.Tensor]:
        """Positions ``[axes, tokens]`` of units behind the anchor, as the model counts them."""
        return compact_positions(self.backbone, self.anchor.input_ids, [self.encoded[n] for n in order])

    def prefill(self, name: str, positions: torch.Tensor, live: LiveKV, behind: Sequence[Span]) -> Span:
        """One forward of a unit at ``positions`` behind the anchor and ``behind``; ``live`` shows those."""
        encoded = self.encoded[name]
        live.show([self.still(self.anchor.kv), *behind], room=encoded.num_tokens)
        return Span.computed(self.backbone.prefill([encoded], [positions], live)[0], positions)

    def still(self, kv: KV) -> Span:
        """KV that is shown where it was computed."""
        return Span(kv, None, (0,) * self.backbone.axes)

    def offset(self, name: str, span: Span, positions: torch.Tensor) -> tuple[int, ...]:
        """From a KV's place to ``positions``. Raises NotRelocatable if it does not move as a whole."""
        offset = uniform_offset(span.positions, positions)
        if offset is None:
            raise NotRelocatable(f"unit {name!r} does not move as a whole in this window: leave its item out")
        return offset

    def move(self, name: str, span: Span, positions: torch.Tensor, patch: Patch | None = None) -> Span:
        """KV moved to ``positions``, with a patch. Raises NotRelocatable if it does not move as a whole."""
        return Span(span.kv, patch, self.offset(name, span, positions))

    def tokens(self, order: Sequence[str]) -> int:
        return sum(self.chunks[name].num_tokens for name in order)


class Placing:
    """An adapter on a desk: a subclass gives the spans of a window (`spans`), once it is asked about.

    ``self.order`` and ``self.shown`` are the last window and its spans; ``self.recomputed`` (tokens) and
    ``self.forwards`` count what it computed since the last `place`, ``self.kept`` the bytes it holds.
    """

    rehearsed = False
    stores_canonicals = False

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.live = desk.backbone.live()
        self.order: tuple[str, ...] = ()
        self.shown: list[Span] | None = None
        self.recomputed, self.forwards, self.kept = 0.0, 0, 0

    def encode(self, unit: Unit) -> None:
        """Encode the unit; if the arm stores canonicals, compute its own."""
        self.desk.encode_once(unit)
        if self.stores_canonicals and not unit.live:
            self.desk.canonical(unit.name)

    def place(self, order: Sequence[str]) -> None:
        self.recomputed, self.forwards = 0.0, 0
        self.order, self.shown = tuple(order), self.spans(tuple(order))

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """Spans of the window's units in this order."""
        raise NotImplementedError

    def ask(self, query: ArmQuestion) -> Reply:
        """A greedy answer; live units of the query are prefilled behind the window first."""
        assert self.shown is not None, "place a window first"
        desk, backbone = self.desk, self.desk.backbone
        for unit in query.live:
            desk.encode_once(unit)
        started = time.perf_counter()
        order = [*self.order, *(unit.name for unit in query.live)]
        encoded, behind = [desk.encoded[name] for name in order], self._prefill_behind(self.shown, order)
        ids = backbone.builder.question_ids(query.text, desk.anchor.tail)
        positions = text_positions(backbone, desk.anchor.input_ids, encoded, ids)
        self.live.show([desk.still(desk.anchor.kv), *behind], room=ids.shape[0] + query.max_new_tokens)
        logits = backbone.ask([ids], positions, self.live)[0][-1].cpu()  # on a GPU, time ends when it is here
        seconds = time.perf_counter() - started
        answer = logits.argmax()[None]
        if query.max_new_tokens > 1:
            made = backbone.decode(
                torch.cat([desk.anchor.input_ids, *(f.input_ids for f in encoded), ids]),
                torch.cat([desk.anchor.positions, *desk.places(order), positions], dim=1),
                self.live,
                max_new_tokens=query.max_new_tokens,
                do_sample=False,
            )
            answer = made.tokens[0].cpu()
        text, tokens = backbone.builder.detokenize(answer) or "", desk.tokens(self.order)
        return Reply(text, logits, seconds, self.recomputed, self.kept, tokens, self.forwards)

    def extend(self, order: Sequence[str], spans: Sequence[Span]) -> list[Span]:
        """``spans`` of the first units of ``order``, and one counted forward for each of the others."""
        new = order[len(spans) :]
        self.recomputed, self.forwards = self.recomputed + self.desk.tokens(new), self.forwards + len(new)
        return self._prefill_behind(spans, order)

    def _prefill_behind(self, spans: Sequence[Span], order: Sequence[str]) -> list[Span]:
        made, places = list(spans), self.desk.places(order)
        for name, positions in list(zip(order, places, strict=True))[len(made) :]:
            made.append(self.desk.still(self.desk.prefill(name, positions, self.live, made).kv))
        return made
