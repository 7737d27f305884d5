"""Decides which stored patch a chunk is served with: from rows and a policy, without a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kamera.patches import Catalogue, Stored, stored_patch
from kamera.store import ObjectInfo
from kamera.trust import Guarantee, ReusePolicy, at_least, guarantee_named, weakest
from kamera.window.requests import Newcomer
from kamera.window.seats import Offer, Seat, Seats, footing


@dataclass(frozen=True)
class Offers:
    """The patches that have a row, and those that the plan itself forms.

    ``formed`` holds of these the guarantee behind which each is formed, by chunk, antecedents and base.
    """

    rows: Catalogue
    policy: ReusePolicy
    formed: Mapping[tuple[str, tuple[str, ...], str], Guarantee]

    def best(self, chunk: Newcomer | Seat, before: Seats, base: ObjectInfo | None) -> Offer | None:
        """The best patch for a chunk behind ``before``; with a ``base``, only of those added to it."""
        antecedents, anchor = before.chunk_ids, "" if base is None else base.context.anchor
        offer = self.behind(chunk, before, anchor) if self.policy.admits("patched") else None
        if offer is not None or base is not None:
            return offer
        if self.policy.admits("orbit"):
            row = self._row(chunk, antecedents, "orbit")
            if row is not None:
                return replace(self._offer("orbit", row), antecedents=antecedents)
        limit = self.policy.max_divergence
        if limit is not None and self.policy.admits("near"):
            for distance, info in self.rows.near(chunk.chunk_id, before.chunk_ids, limit):
                row = self._row(chunk, info.antecedents, info.kind)
                if row is not None:
                    note = f"near: a patch of other antecedents, divergence {distance:.2f}"
                    return replace(self._offer("near", row), note=note)
        return None

    def behind(self, chunk: Newcomer | Seat, before: Seats, anchor: str = "") -> Offer | None:
        """The patch for exactly the chunks ``before`` it, added to the canonical behind ``anchor``.

        First the one behind these chunks in their present order; then the one behind survivors of the same
        lineage, which is no worse than a forward now. None without one.
        """
        enough = weakest((footing(before), "patched"))
        for names in dict.fromkeys((before.chunk_ids, before.lineage)):
            offer = self._patch_offer(chunk, names, anchor)
            if offer is not None and at_least(guarantee_named(offer.formed), enough):
                return offer
        return None

    def alone(self, chunk: Seat, predecessor: str) -> Offer | None:
        """The stored patch behind one chunk alone; None without one."""
        offer = self._patch_offer(chunk, (predecessor,), "")
        return None if offer is None else replace(offer, guarantee="near")

    def _patch_offer(self, chunk: Newcomer | Seat, antecedents: tuple[str, ...], anchor: str) -> Offer | None:
        """The patch stored, or to be stored, behind these antecedents."""
        note = anchor and f"base: the canonical behind another system prompt, {anchor[:12]}"
        formed = self.formed_behind(chunk, antecedents, anchor)
        if formed is None:
            return None
        row = self._row(chunk, antecedents, "exact", anchor)
        known = row is not None and row.formed == formed
        error, created = (row.error, row.created) if row is not None and known else (None, None)
        return Offer("patched", antecedents, "exact", formed, note, anchor, error, created)

    def _row(
        self, chunk: Newcomer | Seat, antecedents: Sequence[str], kind: str, base: str = ""
    ) -> ObjectInfo | None:
        return self.rows.patch_within(chunk.chunk_id, chunk.length, antecedents, kind, self.policy, base)

    def _offer(self, guarantee: Guarantee, row: ObjectInfo) -> Offer:
        return Offer(guarantee, row.antecedents, row.kind, row.formed, error=row.error, created=row.created)

    def find(self, chunk: Newcomer | Seat, antecedents: tuple[str, ...], base: str = "") -> Stored | None:
        """The patch for ``antecedents`` that is stored, or that the plan forms; None without one."""
        formed = self.formed.get((chunk.chunk_id, antecedents, base))
        if formed is not None and not self.rows.has_refused(chunk.chunk_id, antecedents, "exact", base):
            return Stored(formed, serves=True)
        row = self.rows.patch(chunk.chunk_id, antecedents, "exact", base)
        return stored_patch(row, self.policy.budget, chunk.length, self.policy.max_error)

    def formed_behind(
        self, chunk: Newcomer | Seat, antecedents: tuple[str, ...], base: str = ""
    ) -> Guarantee | None:
        """Guarantee behind which the patch for ``antecedents`` was, or will be, formed; None without one."""
        patch = self.find(chunk, antecedents, base)
        return patch.formed if patch is not None and patch.serves else None
