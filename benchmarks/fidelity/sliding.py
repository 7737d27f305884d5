"""The steady state of a sliding window: passages are read, the last N stay, and the tokens that run.

A slot's KV is what was computed when it was appended, behind what the window then showed. `Keep` says what of
it is shown once others have left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.fidelity.reader import Reader, Source
from kamera.ops import compress, kv_bytes


@dataclass(frozen=True)
class Keep:
    """How slots that stay are shown after a departure.

    ``lead``: the first one from its canonical. ``behind`` (1, 2): the KV of a chunk behind so many
    predecessors alone is formed after its append, and shown where just these stand before it or more than
    ``above`` has departed; ``size`` stores it as a patch of this share of the bf16 bytes. With ``mixes`` it
    is averaged with the KV that the slot has, and weighs the share that has departed. ``again``: what has
    lost more is formed again after each slide. ``slides_first``: the oldest leaves before the new one comes.
    """

    name: str
    lead: bool = True
    behind: int = 0
    above: float = 0.5
    size: float | None = None
    mixes: bool = False
    again: float | None = None
    slides_first: bool = False


KEEPS = (
    Keep("rotation alone", lead=False),
    Keep("lead exact"),
    Keep("predecessor above 1/2", behind=1),
    Keep("predecessor mixed", behind=1, above=0.0, mixes=True),
    Keep("two predecessors mixed", behind=2, above=0.0, mixes=True),
)
"""At every N."""

MORE = (
    Keep("formed again above 1/2", again=0.5),
    Keep("formed again above 3/4", again=0.75),
    Keep("predecessor above 1/2, and formed again", behind=1, again=0.5),
    *(replace(keep, name=f"slide, then append: {keep.name}", slides_first=True) for keep in KEEPS[:3]),
)
"""At N = 4 alone."""

SHOWN = (
    Keep("lead exact"),
    *(Keep(f"predecessor above {above}", behind=1, above=above) for above in (0.25, 0.6, 0.75)),
    Keep("predecessor everywhere", behind=1, above=0.0),
    Keep("predecessor mixed", behind=1, above=0.0, mixes=True),
    *(Keep(f"two predecessors above {above}", behind=2, above=above) for above in (0.25, 0.5, 0.75)),
    Keep("two predecessors everywhere", behind=2, above=0.0),
    Keep("two predecessors mixed", behind=2, above=0.0, mixes=True),
    *(
        Keep(f"predecessor above 0.5, {size:.0%} of bytes", behind=1, size=size)
        for size in (0.06, 0.12, 0.25)
    ),
)
"""Other ways to show a window that was kept by its predecessors: one walk for all of them."""


@dataclass(frozen=True)
class Slot:
    """A chunk by its number: what was computed for it last, and behind which others."""

    number: int
    source: Source
    antecedents: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """What a window shows in the end, and the tokens that ran in steady state, by new token.

    ``departed`` of each slot is the share of its antecedents' tokens that are gone.
    """

    name: str
    sources: tuple[Source, ...]
    now: float
    background: float
    prefix_cache: float
    departed: tuple[float, ...]


@dataclass(eq=False)
class Passages:
    """The chunks of a document, and what was computed of each by itself: the same under every `Keep`."""

    reader: Reader
    chunks: Sequence[torch.Tensor]
    _made: dict[tuple[int, int, float | None], Source] = field(default_factory=dict)
    _begun: dict[int, list[Source]] = field(default_factory=dict)

    def alone(self, number: int) -> Source:
        """The canonical of a chunk."""
        return self.stored(number, 0, None)

    def stored(self, number: int, behind: int, size: float | None) -> Source:
        """A chunk behind its ``behind`` predecessors alone."""
        key = number, behind, size if behind else None
        if key not in self._made:
            before = [self.stored(number - i, behind - i, size) for i in range(behind, 0, -1)]
            (made,) = self.reader.prefill([self.chunks[number]], before)
            if behind and size is not None:
                made = self._compressed(made, self.alone(number), size)
            self._made[key] = made
        return self._made[key]

    def begun(self, first: int, count: int) -> list[Source]:
        """Chunks from ``first`` on, each behind all before it: as long as none has left, all ways are one."""
        if len(self._begun.get(first, ())) < count:
            self._begun[first] = self.reader.prefill(self.chunks[first : first + count])
        return self._begun[first][:count]

    def _compressed(self, made: Source, alone: Source, size: float) -> Source:
        item = next(iter(alone.kv.parts[0].values())).itemsize
        budget = int(size * kv_bytes(alone.kv) * 2 / item)
        deltas = self.reader.deficit(made, alone)
        return alone._replace(patch=compress(deltas, self.reader.layout, budget).patch)


def windows(
    passages: Passages, most: int, keeps: Sequence[Keep], shown: Sequence[Keep] = ()
) -> Iterator[Window]:
    """The last ``most`` chunks: re-prefilled, blind, and as each of ``keeps`` shows them.

    All of them came to a full window: twice as many chunks are read. The last of ``keeps`` is ``shown`` in
    other ways, too.
    """
    last = range(len(passages.chunks) - most, len(passages.chunks))
    true = passages.reader.prefill([passages.chunks[n] for n in last])
    yield Window("re-prefill", tuple(true), 0.0, 0.0, 0.0, ())
    yield Window("blind", tuple(map(passages.alone, last)), 0.0, 1.0, 0.0, ())
    for keep in keeps:
        yield from _walk(passages, most, keep, shown if keep is keeps[-1] else ())


def _walk(passages: Passages, most: int, keep: Keep, others: Sequence[Keep]) -> Iterator[Window]:
    slots: list[Slot] = []
    now = background = cached = new = 0
    first = max(0, len(passages.chunks) - 2 * most)
    begun = passages.begun(first, most + (not keep.slides_first))  # until one has left
    for number, chunk in enumerate(passages.chunks[first:], first):
        steady = number - first >= most
        if keep.slides_first:
            slots = slots[-(most - 1) :]
        if number - first < len(begun):
            source = begun[number - first]
        else:
            (source,) = passages.reader.prefill([chunk], _shown(passages, slots, keep))
        slots.append(Slot(number, source, tuple(slot.number for slot in slots)))
        if steady:
            now, new = now + len(chunk), new + len(chunk)
            background += len(chunk) * (keep.lead + keep.behind)
            cached += sum(len(passages.chunks[slot.number]) for slot in slots)
        slots = slots[-most:]
        if keep.again is None:
            continue
        if number == len(passages.chunks) - 1:
            shown = tuple(_shown(passages, slots, keep))
            yield Window(f"{keep.name}, at once", shown, now / new, background / new, cached / new, ())
        for i in range(1, len(slots)):
            if _departed(passages, slots, i) > keep.again:
                before = _shown(passages, slots[:i], keep)
                (source,) = passages.reader.prefill([passages.chunks[slots[i].number]], before)
                slots[i] = Slot(slots[i].number, source, tuple(slot.number for slot in slots[:i]))
                background += steady * len(passages.chunks[slots[i].number])
    departed = tuple(_departed(passages, slots, i) for i in range(len(slots)))
    for other in (keep, *others):
        shown = tuple(_shown(passages, slots, other))
        extra = other.lead + other.behind - keep.lead - keep.behind
        yield Window(other.name, shown, now / new, background / new + extra, cached / new, departed)


def _shown(passages: Passages, slots: Sequence[Slot], keep: Keep) -> list[Source]:
    found = []
    for i, slot in enumerate(slots):
        before = [s.number for s in slots[:i]]
        exact = next(
            (n for n in range(1, keep.behind + 1) if before == [slot.number - m for m in range(n, 0, -1)]), 0
        )
        if keep.lead and i == 0:
            found.append(passages.alone(slot.number))
        elif exact:
            found.append(passages.stored(slot.number, exact, keep.size))
        elif keep.behind and _departed(passages, slots, i) > keep.above and slot.number >= keep.behind:
            stored = passages.stored(slot.number, keep.behind, keep.size)
            weight = _departed(passages, slots, i) if keep.mixes else 1.0
            found.append(passages.reader.mix(slot.source, stored, weight))
        else:
            found.append(slot.source)
    return found


def _departed(passages: Passages, slots: Sequence[Slot], i: int) -> float:
    """The share of the tokens of a slot's antecedents that stand before it no more."""
    stay = {slot.number for slot in slots[:i]}
    lengths = {n: len(passages.chunks[n]) for n in slots[i].antecedents}
    gone = sum(length for n, length in lengths.items() if n not in stay)
    return gone / max(1, sum(lengths.values()))
