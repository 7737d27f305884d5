"""One window [anchor, antecedents…, target] and every KV of the target that an arm may start from.

All that arms share is run once and kept: the vision encodes, the canonical, the context, the
conditioned KV. Everything speaks `kamera.ops` KV, so attention families do not differ here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kamera.content import Chunk, Encoded
from kamera.engines.hf import HfEngine, forwards
from kamera.engines.hf.cache import ModelCache, read
from kamera.errors import EmptyChunk, InvalidPermutation, NotRelocatable
from kamera.ops import (
    KV,
    Deltas,
    Layout,
    Patch,
    apply_patch,
    deficit,
    kv_bytes,
    kv_concat,
    kv_copy,
    mean_deficit,
    patch_of,
    relocate_kv,
    uniform_offset,
)
from kamera.patches.anchor import Anchor, prefill_anchor
from kamera.patches.orbit import orderings

ORBIT_SAMPLES = 24
"""Orderings of more antecedents than can all be run."""

BATCH_BYTES = 256 * 2**20
"""Questions are asked side by side as long as their copies of the cache stay below this."""

Operator = Callable[[KV, Patch | None, Layout, Sequence[int]], KV]
"""Serves KV with a patch of its frame, moved by an offset: `kamera.ops.apply_patch`, or one that is wrong."""


class Scene:
    """A window of one anchor, ``antecedents`` and, last, ``target``; questions come behind it.

    ``system`` is the system prompt as `KameraWindow` takes it, or an `Anchor` prefilled before (scenes
    of one measurement should share it). Everything is computed on first use and kept; nothing a scene
    returns may be written in place. Scenes made by `behind` and `reordered` share encodes, canonical
    and common prefixes of the context with this one.
    """

    def __init__(
        self,
        backbone: HfEngine,
        system: Anchor | str | torch.Tensor | Sequence[int] | None,
        antecedents: Sequence[Chunk],
        target: Chunk,
    ) -> None:
        anchor = system if isinstance(system, Anchor) else prefill_anchor(backbone, system)
        self._shared = _Shared(backbone, anchor)
        self.antecedents = tuple(antecedents)
        self.target = target
        self.operator: Operator = apply_patch
        self._siblings: dict[tuple[str, ...], Scene] = {}

    # -- siblings ------------------------------------------------------------------------------

    def behind(self, antecedents: Sequence[Chunk]) -> Scene:
        """The same target behind other antecedents; the same sibling whenever it is asked for."""
        key = tuple(c.id for c in antecedents)
        if key == tuple(c.id for c in self.antecedents):
            return self
        if key not in self._siblings:
            self._siblings[key] = self._sibling(antecedents)
        sibling = self._siblings[key]
        # siblings are shared with scenes of other operators
        return sibling if sibling.operator is self.operator else sibling.under(self.operator)

    def reordered(self, order: Sequence[int]) -> Scene:
        """The same target behind these antecedents in another order, ``order[i]`` now at place i."""
        if sorted(order) != list(range(len(self.antecedents))):
            raise InvalidPermutation(
                f"order {list(order)} is no permutation of {len(self.antecedents)} antecedents"
            )
        return self.behind([self.antecedents[i] for i in order])

    def _sibling(self, antecedents: Sequence[Chunk]) -> Scene:
        sibling = Scene.__new__(Scene)
        sibling._shared, sibling._siblings = self._shared, {}
        sibling.antecedents, sibling.target = tuple(antecedents), self.target
        sibling.operator = self.operator
        return sibling

    def under(self, operator: Operator) -> Scene:
        """This scene, served by another operator; what is true and what is blind stay as they are."""
        other = copy.copy(self)
        other.operator = operator
        return other

    # -- where and what ------------------------------------------------------------------------

    @property
    def backbone(self) -> HfEngine:
        """The model all of this runs on."""
        return self._shared.backbone

    @property
    def anchor(self) -> Anchor:
        """The system prompt, prefilled."""
        return self._shared.anchor

    @property
    def layout(self) -> Layout:
        """Layers and channels of every KV here."""
        return self.backbone.layout

    @cached_property
    def encoded(self) -> Encoded:
        """The target behind the vision tower: what `Engine.prefill` takes."""
        return self._shared.encoded(self.target)

    @cached_property
    def _places(self) -> list[torch.Tensor]:
        return self._shared.places([*self.antecedents, self.target])

    @property
    def positions(self) -> torch.Tensor:
        """The target's positions in this window, int64 ``[axes, tokens]``."""
        return self._places[-1]

    @cached_property
    def context_positions(self) -> torch.Tensor:
        """Positions of anchor and antecedents, int64 ``[axes, tokens]``."""
        return torch.cat([self.anchor.positions, *self._places[:-1]], dim=1)

    @property
    def canonical_positions(self) -> torch.Tensor:
        """The target's positions right behind the anchor, int64 ``[axes, tokens]``."""
        return self._shared.canonical(self.target).positions

    @cached_property
    def offset(self) -> tuple[int, ...]:
        """From the canonical's place to the target's, one entry per axis."""
        return self.offset_from(self.canonical_positions)

    def offset_from(self, positions: torch.Tensor) -> tuple[int, ...]:
        """From ``positions`` ``[axes, tokens]`` of the target to its place here, one entry per axis."""
        offset = uniform_offset(positions, self.positions)
        if offset is None:
            raise NotRelocatable(
                f"chunk {self.target.id[:12]} does not move as a whole to its place in this scene: its "
                "tokens shift against each other; leave it out of the measurement"
            )
        return offset

    # -- KV of the target ----------------------------------------------------------------------

    @property
    def canonical(self) -> KV:
        """KV(B|∅) at `canonical_positions`."""
        return self._shared.canonical(self.target).kv

    @cached_property
    def blind(self) -> KV:
        """The canonical relocated to the target's place."""
        return relocate_kv(self.canonical, self.layout, self.offset)

    @cached_property
    def conditioned(self) -> KV:
        """KV(B|A) at the target's place, from a prefill behind `context`."""
        cache = _shared(self.backbone, self._shared.trunk(self.antecedents)[-1].cache)
        return kv_copy(forwards.run(self.backbone, self.encoded, self.positions, cache)[0])

    @cached_property
    def delta(self) -> Deltas:
        """The deficit KV(B|A) − KV(B|∅) in the canonical frame."""
        return deficit(self.conditioned, self.canonical, self.layout, self.offset)

    @cached_property
    def patch(self) -> Patch:
        """All directions of `delta`, strongest first: truncated, it is the best patch of that rank."""
        return patch_of(self.delta, None, self.dtype).patch

    @cached_property
    def other_orders(self) -> tuple[tuple[int, ...], ...]:
        """Orderings of the antecedents that are not the one served.

        All of them up to four antecedents, `ORBIT_SAMPLES` beyond.
        """
        served = [c.id for c in self.antecedents]
        if not served:
            return ()
        orders = orderings(len(served), ORBIT_SAMPLES + 1, seed=0)
        return tuple(o for o in orders if [served[i] for i in o] != served)[:ORBIT_SAMPLES]

    @cached_property
    def orbit(self) -> Patch:
        """All directions of the mean deficit over the *other* orderings of these antecedents.

        The served ordering is held out (`other_orders`). Raises ValueError where there is no other one.
        """
        if not self.other_orders:
            raise ValueError(
                f"{len(self.antecedents)} antecedents in no second order: an orbit needs two different ones"
            )
        siblings = (self._sibling([self.antecedents[i] for i in o]) for o in self.other_orders)
        mean = mean_deficit(s.delta for s in siblings)
        return patch_of(mean, None, self.dtype).patch

    def patched(self, patch: Patch | None) -> KV:
        """The canonical with ``patch`` (of the canonical frame) at the target's place."""
        return self.operator(self.canonical, patch, self.layout, self.offset)

    # -- the window ----------------------------------------------------------------------------

    @cached_property
    def context(self) -> KV:
        """Exact KV of anchor and antecedents, each prefilled behind all that stands before it."""
        return kv_concat([step.kv for step in self._shared.trunk(self.antecedents)])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the target's KV."""
        return kv_bytes(self.canonical)

    @property
    def dtype(self) -> torch.dtype:
        """That of the KV, and so of stored factors."""
        return next(t.dtype for layer in self.canonical for t in layer.values())

    def budget(self, rank: int) -> int:
        """Bytes of a plain rank-``rank`` patch over all layers and channels, in the KV's dtype.

        The currency in which arms are matched. A rank above what a channel can have costs no more
        than all of it.
        """
        if rank < 0:
            raise ValueError(f"rank {rank} is negative")
        tokens = self.target.num_tokens
        size = self.dtype.itemsize
        return sum(
            size * min(rank, tokens, c.features) * (tokens + c.features)
            for spec in self.layout
            for c in spec.channels
        )

    # -- questions -----------------------------------------------------------------------------

    def question(self, text: str) -> torch.Tensor:
        """Token ids of a question with the chat template's closing, int64 ``[tokens]``."""
        return self.backbone.builder.tokenize(text + self.anchor.tail)

    def question_positions(self, tokens: int) -> torch.Tensor:
        """Positions of ``tokens`` text tokens behind the target, int64 ``[axes, tokens]``."""
        text = torch.zeros(tokens, dtype=torch.int64)
        return self._shared.places([*self.antecedents, self.target], text)[-1]

    def logits(self, kv: KV, questions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Next-token logits ``[questions, vocabulary]`` of each question behind `context` and ``kv``.

        ``kv`` is the target's, at its place. Questions are text token ids ``[tokens]``; those of equal
        length are run side by side.
        """
        lengths = [int(q.shape[0]) for q in questions]
        if 0 in lengths:
            raise EmptyChunk(f"question {lengths.index(0)} has no tokens: ask something")
        whole = kv_concat([self.context, kv])
        rows = max(1, BATCH_BYTES // max(1, kv_bytes(whole)))
        answers: list[torch.Tensor] = [torch.empty(0)] * len(questions)
        for length in sorted(set(lengths)):
            positions = self.question_positions(length)
            alike = [i for i, n in enumerate(lengths) if n == length]
            for start in range(0, len(alike), rows):
                batch = alike[start : start + rows]
                ids = torch.stack([questions[i] for i in batch])
                out = forwards.forward_batch(
                    self.backbone, ids, positions, forwards.make_cache(self.backbone, [whole])
                )
                for i, row in zip(batch, out, strict=True):
                    answers[i] = row[-1]
        return torch.stack(answers)


@dataclass(frozen=True, eq=False)
class _Canonical:
    kv: KV
    positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Step:
    """One span of a context: its own KV, and a live cache of everything up to its end."""

    name: str
    kv: KV
    cache: ModelCache


@dataclass(eq=False)
class _Shared:
    """What scenes of one family have in common. Keeps one context's prefixes: that of the last asked."""

    backbone: HfEngine
    anchor: Anchor
    _encoded: dict[str, Encoded] = field(default_factory=dict)
    _canonical: dict[str, _Canonical] = field(default_factory=dict)
    _trunk: list[_Step] = field(default_factory=list)

    def encoded(self, chunk: Chunk) -> Encoded:
        if chunk.id not in self._encoded:
            self._encoded[chunk.id] = self.backbone.encode(chunk)
        return self._encoded[chunk.id]

    def places(self, chunks: Sequence[Chunk], text: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The model's own positions of chunks (and text) standing behind the anchor."""
        ids = [self.anchor.input_ids, *[c.input_ids for c in chunks]]
        inputs: list[Mapping[str, torch.Tensor]] = [{}, *[c.position_inputs() for c in chunks]]
        if text is not None:
            ids, inputs = [*ids, text], [*inputs, {}]
        whole = self.backbone.positions(ids, inputs)
        return list(whole.split([int(i.shape[0]) for i in ids], dim=1))[1:]

    def canonical(self, chunk: Chunk) -> _Canonical:
        if chunk.id not in self._canonical:
            (positions,) = self.places([chunk])
            cache = forwards.make_cache(self.backbone, [self.anchor.kv])
            kv, _ = forwards.run(self.backbone, self.encoded(chunk), positions, cache)
            self._canonical[chunk.id] = _Canonical(kv_copy(kv), positions)
        return self._canonical[chunk.id]

    def trunk(self, antecedents: Sequence[Chunk]) -> list[_Step]:
        """Anchor and antecedents, each prefilled behind all before it; common prefixes run once."""
        if not self._trunk:
            self._trunk = [_Step("", self.anchor.kv, forwards.make_cache(self.backbone, [self.anchor.kv]))]
        same = 0
        for chunk, step in zip(antecedents, self._trunk[1:], strict=False):
            if chunk.id != step.name:
                break
            same += 1
        steps = self._trunk[: same + 1]
        places = self.places(antecedents)
        for chunk, place in list(zip(antecedents, places, strict=True))[same:]:
            cache = _shared(self.backbone, steps[-1].cache)
            kv, _ = forwards.run(self.backbone, self.encoded(chunk), place, cache)
            steps.append(_Step(chunk.id, kv, cache))
        self._trunk = steps
        return steps


def _shared(backbone: HfEngine, cache: ModelCache) -> ModelCache:
    """A cache over the same tensors: appending to it does not change ``cache``."""
    return forwards.make_cache(backbone, [read(cache, backbone.layout, backbone.groups)])
