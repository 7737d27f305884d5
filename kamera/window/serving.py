"""Serving: bring a chunk to a place in a window, by the best stored means the policy admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from kamera.backbones import Backbone, Encoded
from kamera.backbones.backbone import ModelCache
from kamera.errors import (
    IncompatibleChunk,
    NotRelocatable,
    PolicyRefused,
    UnknownChunk,
)
from kamera.ops import (
    KV,
    Patch,
    deficit,
    kv_map,
    uniform_offset,
)
from kamera.store import CanonicalRecord, ChunkStore, Context, PatchRecord
from kamera.store.keys import chunk_of
from kamera.store.records import kept
from kamera.store.search.embedding import VISION_TOKENS
from kamera.window.anchor import Anchor
from kamera.window.envelope import Near, likeness, nearest
from kamera.window.forming import Forming
from kamera.window.losses import Losses, Strict
from kamera.window.policy import (
    GUARANTEES,
    Guarantee,
    OnMiss,
    ReusePolicy,
    at_least,
    prefilled_behind,
    weakest,
)
from kamera.window.report import Tally
from kamera.window.slots import Copy, Facts, Resident, Span
from kamera.window.state import WindowState
from kamera.window.stored import Stored

Behind = Callable[[WindowState, int, Tally], AbstractContextManager[ModelCache]]
"""A state's KV as one cache, with room for so many tokens behind it, while the block lasts."""


class Server:
    """Places chunks: looks patches up, applies them, forms and archives what is missing.

    Holds no window state; what it returns is new, what it is given stays as it was. What the store cannot
    take or give is raised, unless ``losses`` bear it.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: ChunkStore,
        anchor: Anchor,
        policy: ReusePolicy,
        forming: Forming | None = None,
        losses: Losses | None = None,
    ) -> None:
        policy.budget.check(len(backbone.layout))
        self.backbone = backbone
        self.store = store
        self.anchor = anchor
        self.policy = policy
        self.forming = forming or Forming()
        self.context = Context(backbone.fingerprint, anchor.digest, store.tenant, store.kv)
        self.losses = losses or Strict()
        self._compared = -1
        self.check_computation()
        self.stored = Stored(store, self.context, policy.budget, self.forming, self.losses)
        self._anchor_copy = Copy(anchor.kv, anchor.positions, None, "exact", (), canonical=True)

    # -- the model -----------------------------------------------------------------------------

    def check_computation(self) -> None:
        """Raise unless the model is the one that this window and the store's KV were made with.

        IncompatibleChunk when the fingerprint is another. Where something has moved and it is not,
        ComputationChanged when the probe is answered otherwise than when the store was first used with it.
        """
        if self.backbone.fingerprint != self.context.fingerprint:
            raise IncompatibleChunk(
                "the backbone's weights have changed since this window was made, or its settings, hooks or "
                "autocast: its KV is stale; undo that, or make a new window"
            )
        moves = self.backbone.identity.moves
        if moves != self._compared:
            backbone = self.backbone
            self.store.probes.compare(self.context.fingerprint, backbone.answers, backbone.tolerance)
            self._compared = moves

    # -- canonicals ----------------------------------------------------------------------------

    def known(self, chunk_id: str) -> Facts:
        """Facts of an archived chunk. Raises UnknownChunk, IncompatibleChunk or CorruptChunk."""
        record = self.store.get_canonical(self.context, chunk_id)
        others = self.store.contexts_of(chunk_id) if record is None else []
        for other in others:
            # kept in another form its KV is none for this window, but its encoding is the same
            if record is None and replace(other, kv=self.context.kv) == self.context:
                record = self.store.get_canonical(other, chunk_id)
        if record is not None:
            return _facts(record)
        if any(c.fingerprint == self.context.fingerprint for c in others):
            raise IncompatibleChunk(
                f"chunk {chunk_id[:12]} was archived behind another system prompt: append its content "
                "to this window, or open the window with that prompt"
            )
        if others:
            raise IncompatibleChunk(
                f"chunk {chunk_id[:12]} was archived by backbone {others[0].fingerprint[:12]}, this is "
                f"{self.context.fingerprint[:12]}: append its content with this backbone"
            )
        raise UnknownChunk(
            f"no chunk {chunk_id!r} in {self.store!r} for this backbone and system prompt: append its "
            "content first"
        )

    def archived(self, chunk_id: str) -> Facts | None:
        """Facts of an archived chunk, or None; a damaged archive is a miss, and said so."""
        record = self.stored.canonical(chunk_id)
        return None if record is None else _facts(record)

    def as_cheap(self) -> Server:
        """The same, serving what is stored for these very antecedents and running no forward for a miss."""
        minimum: Guarantee = "orbit" if self.policy.admits("orbit") else "patched"
        return self._under(minimum, "blind")

    def as_forming(self) -> Server:
        """The same, prefilling on every miss and keeping the patches."""
        return self._under("exact" if self.policy.minimum == "exact" else "patched", "form")

    def exactly(self) -> Server:
        """The same under a minimum of "exact"."""
        return Server(self.backbone, self.store, self.anchor, self.policy.exactly(), self.forming)

    def _under(self, minimum: Guarantee, on_miss: OnMiss) -> Server:
        # a patch of other antecedents could hold the very chunk whose absence is asked about
        policy = replace(self.policy, minimum=minimum, on_miss=on_miss, max_divergence=None)
        return Server(self.backbone, self.store, self.anchor, policy, self.forming, self.losses)

    def canonical(self, facts: Facts) -> Copy:
        """The chunk's KV behind the anchor alone, as the store keeps it; prefilled when it does not yet.

        Patches are formed against this and applied to it, so that they match: in a store of codes they
        make up for what the codes lost, too.
        """
        record = self.stored.canonical(facts.chunk_id)
        if record is None:
            copy, record = self._computed(facts)
            if record.loss is None:
                return copy
        return self._out_of(record)

    def archive(self, facts: Facts, copy: Copy) -> CanonicalRecord:
        """Store a canonical copy; what the store keeps of it."""
        encoded = facts.encoded
        record = kept(
            CanonicalRecord(
                chunk_id=facts.chunk_id,
                context=self.context,
                input_ids=encoded.input_ids,
                positions=copy.positions,
                kv=tuple(copy.kv),
                inputs=encoded.position_inputs,
                embeds=encoded.tensors,
                info={"label": facts.label, VISION_TOKENS: [*self.backbone.builder.vision_tokens]},
            )
        )
        self.stored.keep(record)
        return record

    def alone(self, facts: Facts) -> torch.Tensor:
        """The model's positions of a chunk right behind the anchor, ``[axes, tokens]``."""
        positions = self.backbone.positions(
            [self.anchor.input_ids, facts.encoded.input_ids], [{}, facts.position_inputs]
        )
        return positions[:, self.anchor.length :]

    # -- patches -------------------------------------------------------------------------------

    def harvest(self, facts: Facts, conditioned: Copy, formed: Guarantee) -> None:
        """Store the patch that takes the canonical to ``conditioned``, unless a better one is there.

        ``formed`` is the weakest guarantee among the antecedents it was prefilled behind. A copy
        conditioned by near or blind KV carries their error and is not harvested.
        """
        if not conditioned.antecedents or not at_least(formed, "survivor"):
            return
        # one that was formed behind these very chunks serves survivors too, and better
        chunks = tuple(map(chunk_of, conditioned.antecedents))
        for behind in dict.fromkeys((chunks, conditioned.antecedents)):
            held = self.stored.patch(facts, behind, "exact", Tally())
            if held is not None and at_least(_guarantee(held.formed), formed):
                return
        canonical = self.canonical(facts)
        if facts.chunk_id in self.losses.unkept:
            return  # its patch would have nothing to be served with
        offset = self._offset(facts, canonical.positions, conditioned.positions)
        deltas = deficit(conditioned.kv, canonical.kv, self.backbone.layout, offset)

        def form() -> Patch:
            (patch, energy), filled = self.policy.budget.form(deltas, self.backbone.layout, canonical.kv)
            info = {"energy": energy, **filled.to_info()}
            behind = conditioned.antecedents
            record = PatchRecord(facts.chunk_id, self.context, behind, "exact", patch, formed, info)
            self.store.put_patch(record)
            return patch

        with self.losses.borne(f"a patch of chunk {facts.chunk_id[:12]} was not kept"):
            self.forming.submit(facts.chunk_id, deltas, form)

    # -- placing -------------------------------------------------------------------------------

    def anchored(self, frame: Sequence[int]) -> Span:
        """The anchor, to stand ``frame`` from where it was prefilled."""
        return Span(self._anchor_copy, tuple(frame))

    def span(self, resident: Resident) -> Span:
        """A resident's copy, to stand where it says. Raises NotRelocatable where it cannot."""
        self.backbone.check_positions(resident.positions)
        shown = resident.shown
        return Span(shown, self._offset(resident.facts, shown.positions, resident.positions))

    def move(self, resident: Resident, positions: torch.Tensor) -> Resident:
        """The same chunk at other positions. Raises NotRelocatable where it cannot stand there."""
        if torch.equal(positions, resident.positions):
            return resident
        there = replace(resident, positions=positions)
        self.span(there)
        return there

    def bring(
        self,
        facts: Facts,
        before: WindowState,
        positions: torch.Tensor,
        tally: Tally,
        behind: Behind,
        was: Resident | None = None,
    ) -> Resident:
        """A chunk at ``positions`` behind ``before``, by the best means the policy admits.

        ``behind`` gives the live cache of ``before`` if a forward has to be run. ``was`` is the chunk's
        place so far when it is in the window: a copy prefilled behind the very same exact antecedents
        serves again as it is, and a clean view stays one.
        """
        copy = self._best(facts, before, tally, was)
        if copy is not None:
            arrived = Resident(facts, copy, positions, copy.guarantee)
            self.span(arrived)
        else:
            with behind(before, facts.length, tally) as cache:
                arrived = self.prefill(facts, before, positions, cache)
            if self.policy.on_miss == "form":
                self.harvest(facts, arrived.copy, arrived.formed)
            arrived = replace(arrived, archived=True if was is None else was.archived)
        self.store.metrics.served(arrived.guarantee, computed=copy is None)
        if was is None:
            return arrived
        arrived = replace(arrived, number=was.number)
        return arrived if was.clean is None else self.switch(arrived, False)

    def switch(self, resident: Resident, on: bool) -> Resident:
        """The chunk conditioned, or showing its canonical, where it stands."""
        switched = replace(resident, clean=None if on else self.canonical(resident.facts))
        self.span(switched)
        return switched

    def prefill(
        self,
        facts: Facts,
        before: WindowState,
        positions: torch.Tensor,
        cache: ModelCache,
    ) -> Resident:
        """A conditioned forward behind ``before``, whose live cache is extended; nothing is stored.

        Raises PolicyRefused when even that is less than a minimum of "exact".
        """
        state = self._footing(before)
        guarantee = prefilled_behind(state)
        if self.policy.minimum == "exact" and guarantee != "exact":
            raise PolicyRefused(
                f"the window serves exact KV only, but holds {state} KV before this place: switch "
                "conditioning on (condition(slot, True)), or let it serve less (the policy's minimum; "
                "kamera certify)"
            )
        kv, _ = self.backbone.prefill(facts.encoded, positions, cache)
        copy = Copy(_own(kv), positions, None, guarantee, before.lineage, canonical=False)
        return Resident(facts, copy, positions, guarantee, formed=state, archived=False)

    # -- inside --------------------------------------------------------------------------------

    def _footing(self, before: WindowState) -> Guarantee:
        """The weakest KV a chunk here attends to.

        Across a gap, where positions were left out in front, even exact KV is a survivor's: no re-prefill
        of the sequence attends across it.
        """
        footing = weakest(before.worths)
        return weakest((footing, "survivor")) if any(before.shift) else footing

    def _best(
        self,
        facts: Facts,
        before: WindowState,
        tally: Tally,
        was: Resident | None,
    ) -> Copy | None:
        """The best stored copy that is good enough; None when the policy wants a forward."""
        if not before.residents:
            return self._leading(facts)
        now = self._footing(before)
        prefilled = None if was is None or was.copy.canonical else was.copy
        if prefilled and prefilled.antecedents == before.lineage and prefilled.guarantee == now == "exact":
            return prefilled
        if self.policy.minimum != "exact":
            copy = self._patched(facts, before, now, tally)
            if copy is not None:
                return copy
        if self.policy.admits("blind") or self.policy.on_miss == "blind":
            return replace(self.canonical(facts), guarantee="blind")
        return None

    def _leading(self, facts: Facts) -> Copy | None:
        """The canonical, which out of codes is no more than patched."""
        record = self.stored.canonical(facts.chunk_id)
        copy = self._computed(facts)[0] if record is None else self._out_of(record)
        return copy if self.policy.admits(copy.guarantee) else None

    def _computed(self, facts: Facts) -> tuple[Copy, CanonicalRecord]:
        """The chunk prefilled behind the anchor alone, and what the store now keeps of it."""
        positions = self.alone(facts)
        kv, _ = self.backbone.prefill(facts.encoded, positions, self._anchor_cache())
        copy = Copy(_own(kv), positions, None, "exact", (), canonical=True)
        return copy, self.archive(facts, copy)

    def _out_of(self, record: CanonicalRecord) -> Copy:
        kv, lossy = self.backbone.place(record.kv), record.loss is not None
        return Copy(kv, record.positions, None, "patched" if lossy else "exact", (), True, lossy)

    def _patched(self, facts: Facts, before: WindowState, now: Guarantee, tally: Tally) -> Copy | None:
        antecedents = before.chunk_ids
        # First what these chunks gave when they stood before one another as they do here; then what they
        # gave as survivors that remember the very same, which is no worse than a forward now.
        for behind in dict.fromkeys((antecedents, before.lineage)):
            record = self.stored.patch(facts, behind, "exact", tally)
            if record is not None and at_least(_guarantee(record.formed), weakest((now, "patched"))):
                return self._with(facts, record.patch, "patched", behind)
        if self.policy.admits("orbit"):
            record = self.stored.patch(facts, antecedents, "orbit", tally)
            if record is not None:
                return self._with(facts, record.patch, "orbit", antecedents)
        if self.policy.max_divergence is not None and self.policy.admits("near"):
            for distance, info in self._nearest(facts, antecedents, self.policy.max_divergence):
                record = self.stored.patch(facts, info.antecedents, info.kind, tally)
                if record is not None:
                    tally.notes.append(f"near: a patch of other antecedents, divergence {distance:.2f}")
                    return self._with(facts, record.patch, "near", info.antecedents)
        return None

    def _nearest(self, facts: Facts, antecedents: tuple[str, ...], limit: float) -> list[Near]:
        with self.losses.borne(f"patches near chunk {facts.chunk_id[:12]} were not looked up"):
            alike = likeness(self.store, self.context)
            return nearest(self.stored.patches_of(facts), antecedents, limit, alike)
        return []

    def _with(self, facts: Facts, patch: Patch, guarantee: Guarantee, antecedents: tuple[str, ...]) -> Copy:
        canonical = self.canonical(facts)
        return replace(
            canonical,
            patch=patch.truncate(self.policy.rank),
            guarantee=guarantee,
            antecedents=antecedents,
        )

    def _offset(self, facts: Facts, old: torch.Tensor, new: torch.Tensor) -> tuple[int, ...]:
        offset = uniform_offset(old, new)
        if offset is None:
            raise NotRelocatable(
                f"chunk {facts.chunk_id[:12]} does not move as a whole: its tokens shift against each "
                "other at the new place (a clip cut out of a longer one?); append it anew"
            )
        return offset

    def _anchor_cache(self) -> ModelCache:
        return self.backbone.cache([self.anchor.kv])


def _facts(record: CanonicalRecord) -> Facts:
    encoded = Encoded(record.input_ids, dict(record.inputs), dict(record.embeds))
    return Facts(record.chunk_id, encoded, str(record.info.get("label", "")))


def _own(kv: KV) -> KV:
    """A copy that does not keep the whole live cache alive."""
    return kv_map(kv, lambda t: t.detach().clone())


def _guarantee(name: str) -> Guarantee:
    """A stored name as a guarantee; one this version does not know counts as the weakest."""
    return next((g for g in GUARANTEES if g == name), "blind")
