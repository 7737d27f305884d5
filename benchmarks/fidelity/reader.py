"""A model that reads text or pictures from KV of any origin, through the engine's contract alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from kamera import Backbone, Chunk
from kamera.engines import Span
from kamera.ops import KV, Blocks, Deltas, Patch, apply_patch, deficit, kv_map, kv_tokens

Sabotage = Literal["", "no-rotation", "foreign-patch"]
"""An operator that is broken on purpose: keys that move are not turned, a patch is another chunk's."""

SYSTEM = "You answer questions about the notes."
_MARK = "\x00"


class Source(NamedTuple):
    """A chunk's KV as it was computed with its first token at position ``start``, and a patch on it."""

    kv: KV
    start: int
    patch: Patch | None = None


class Reader:
    """Prefills, shows and asks. Nothing is cached: what runs is what is asked for.

    Windows begin with ``anchor``: the chat template up to the user's words, or the first token of a model
    that has no template.
    """

    def __init__(self, backbone: Backbone, sabotage: Sabotage = "", system: str = SYSTEM) -> None:
        self.engine, self.sabotage = backbone.engine, sabotage
        self.layout = self.engine.layout
        self._last: Deltas | None = None  # of the chunk before, for sabotage
        head, self._foot = _frame(backbone.processor, system)
        self.prefix = self.tokenize(head)
        self._live, self._anchor = self.engine.live(), Source(self._run([self.prefix], 0, None)[0], 0)

    def tokenize(self, text: str) -> torch.Tensor:
        """Token ids ``[tokens]``; marks of the chat template are what they spell."""
        return self.engine.builder.tokenize(text, special=True)

    def question(self, text: str) -> torch.Tensor:
        """Token ids of a question, up to where the answer begins."""
        return self.tokenize(f"{text}{self._foot}")

    def prefill(self, chunks: Sequence[torch.Tensor | Chunk], behind: Sequence[Source] = ()) -> list[Source]:
        """Chunks that follow each other behind the anchor and ``behind``: one forward."""
        start = self._show(behind)
        kvs = self._run(chunks, start, self._live)
        starts = [start + sum(map(_count, chunks[:i])) for i in range(len(chunks))]
        return [Source(kv, place) for kv, place in zip(kvs, starts, strict=True)]

    def logits(self, texts: Sequence[torch.Tensor], behind: Sequence[Source]) -> list[torch.Tensor]:
        """Next-token logits ``[tokens, vocabulary]`` after every token of each text, each alone."""
        start = self._show(behind)
        positions = self.positions(start, max(map(len, texts)))
        return list(self.engine.ask(texts, positions, self._live, every=True))

    def answer(
        self, question: torch.Tensor, chunks: Sequence[Any], behind: Sequence[Source], most: int
    ) -> torch.Tensor:
        """The likeliest answer ``[tokens]`` to a question behind chunks, which ``behind`` is the KV of."""
        self._show(behind)
        ids = torch.cat([self.prefix, *chunks, question])
        positions = self.positions(0, len(ids))
        made = self.engine.decode(ids, positions, self._live, max_new_tokens=most, do_sample=False)
        return made.tokens[0]

    def deficit(self, behind: Source, alone: Source) -> Deltas:
        """What a chunk absorbed: its KV ``behind`` others, minus its KV ``alone``."""
        own = deficit(behind.kv, alone.kv, self.layout, self._offset(behind.start - alone.start))
        if self.sabotage != "foreign-patch":
            return own
        last, self._last = self._last or own, own
        count = kv_tokens(alone.kv)
        return kv_map(last, lambda x: x[:, torch.arange(count) % x.shape[1]])

    def mix(self, one: Source, other: Source, weight: float) -> Source:
        """A chunk's KV between two: ``other`` counts by its ``weight``."""
        if weight == 1.0:
            return other
        there = apply_patch(other.kv, other.patch, self.layout, self._offset(one.start - other.start))
        pairs = zip(one.kv.parts, there.parts, strict=True)
        parts = [{n: torch.lerp(x, b[n], weight) for n, x in a.items()} for a, b in pairs]
        return Source(Blocks(parts, one.kv.groups), one.start)

    def positions(self, start: int, count: int) -> torch.Tensor:
        """Positions of text, ``[axes, tokens]``."""
        return torch.arange(start, start + count).expand(self.engine.axes, -1)

    def _show(self, sources: Sequence[Source]) -> int:
        """Show the anchor and sources; the position behind them."""
        at, spans = 0, []
        for kv, start, patch in (self._anchor, *sources):
            moved = 0 if self.sabotage == "no-rotation" else at - start
            spans.append(Span(kv, patch, self._offset(moved)))
            at += kv_tokens(kv)
        self._live.show(spans)
        return at

    def _run(self, chunks: Sequence[torch.Tensor | Chunk], start: int, behind: Any) -> tuple[KV, ...]:
        befores = [sum(map(_count, chunks[:i])) for i in range(len(chunks))]
        places = [self.positions(start + n, _count(c)) for n, c in zip(befores, chunks, strict=True)]
        return self.engine.prefill([self._encoded(c) for c in chunks], places, behind)

    def _encoded(self, chunk: torch.Tensor | Chunk) -> Any:
        made = chunk if isinstance(chunk, Chunk) else self.engine.chunk_from_tensors(chunk)
        return self.engine.encode(made)

    def _offset(self, distance: int) -> tuple[int, ...]:
        return (distance,) * self.engine.axes


def _count(chunk: torch.Tensor | Chunk) -> int:
    return chunk.num_tokens if isinstance(chunk, Chunk) else len(chunk)


def _frame(tokenizer: Any, system: str) -> tuple[str, str]:
    """What stands before the notes, and between a question and its answer."""
    if tokenizer.chat_template is None:
        return tokenizer.bos_token or "Notes\n\n", "\nAnswer:"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": _MARK}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, foot = whole.split(_MARK)
    return head, foot
