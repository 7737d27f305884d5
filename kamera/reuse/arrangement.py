"""Arrangements: chunks to be shown in a window, each with its tier; planned first, run by the window.

The window's own planner decides between kept, patched and prefilled chunks. What it would prefill although
a copy is stored may be served `approximate`: under a calibration, one chunk at a time, each probed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from kamera.content import Chunk
from kamera.engines.hf import Backbone
from kamera.errors import CorruptChunk, StoreError, UnsupportedBackbone, WrongKey
from kamera.ops import kv_concat
from kamera.patches import Guarantee, at_least, weakest
from kamera.reuse.admission import Admission, matched, tier_of
from kamera.reuse.calibration import Calibration
from kamera.reuse.probe import likeness, probed
from kamera.window import GUARANTEES, Cost, KameraWindow, OnLeave, Report, ReusePolicy, Slot

Item = Slot | Chunk


@dataclass(frozen=True)
class _Offer:
    """The stored KV that an approximate segment would be served from."""

    guarantee: Guarantee
    antecedents: tuple[str, ...]


class Outcome(NamedTuple):
    """A run arrangement: the window's report, summed over its steps, and the admissions as they came out."""

    report: Report
    admissions: tuple[Admission, ...]


class Arrangement:
    """The plan of `KameraWindow.arrange`, with the tier of each chunk and approximate ones admitted.

    ``admissions`` are in order; ``cost`` is exact if no segment is refused by its probe, each refusal adds
    one prefill. Without a ``calibration`` nothing approximate is served, whatever the policy's minimum.
    Raises CertificateMismatch for a calibration of another backbone, and the refusals of
    `KameraWindow.plan_arrange`.
    """

    def __init__(
        self,
        window: KameraWindow,
        order: Sequence[Item],
        *,
        on_leave: OnLeave = "repair",
        calibration: Calibration | None = None,
    ) -> None:
        self.window = window
        self._order = tuple(order)
        self._on_leave: OnLeave = on_leave
        self._calibration = calibration
        if calibration is not None:
            calibration.check(window.backbone)
        with _under(window, _strict(window.policy)):
            plan = window.plan_arrange(self._order, on_leave=on_leave)
        self._ids = tuple(_id(item) for item in self._order)
        self._lengths = tuple(_length(item) for item in self._order)
        self._offers: dict[int, _Offer] = {}
        self.cost = plan.cost
        held = {seat.number: seat.source for seat in plan.before.seats}
        found: list[Admission] = []
        at = window.anchor.length
        for i, (seat, worth) in enumerate(zip(plan.after.seats, plan.after.worths, strict=True)):
            tier, source = tier_of(worth), seat.source
            if held.get(seat.number) == source:
                reason = f"{worth}: held by the window"
            elif source.patched:
                reason = f"{worth}: a stored patch for this left context"
            elif source.canonical and self._stored(i):
                reason = f"{worth}: leads the prompt, as its stored copy does"
            else:
                tier, reason = "none", self._why(i)
            found.append(Admission(at, at + seat.length, seat.chunk_id, tier, worth, reason))
            at += seat.length
        self.admissions = tuple(found)
        if calibration is not None:
            self._admit(calibration)

    def run(self) -> Outcome:
        """Bring the window to the arrangement. After an error the window may hold a part: use a fork."""
        strict = _strict(self.window.policy)
        if not self._offers:
            with _under(self.window, strict):
                report = self.window.arrange(self._order, on_leave=self._on_leave)
            return Outcome(report, self._shown())
        assert self._calibration is not None
        first = min(self._offers)
        with _under(self.window, strict):
            reports = [self.window.arrange(self._order[:first])]
        behind, refused = _strict(self.window.policy, behind=True), {}
        at = first
        while at < len(self._order):
            if at in self._offers:
                done, why = self._approximated(at, self._calibration)
                reports += done
                if why is not None:
                    refused[at] = why
                at += 1
                continue
            stop = min((i for i in self._offers if i > at), default=len(self._order))
            with _under(self.window, behind):
                reports.append(self.window.arrange([*self.window.slots, *self._order[at:stop]]))
            at = stop
        return Outcome(_summed(reports), self._shown(refused))

    # -- inside --------------------------------------------------------------------------------

    def _stored(self, index: int) -> bool:
        try:
            return self.window.store.info(self.window.context, self._ids[index]) is not None
        except (CorruptChunk, WrongKey, StoreError):
            return False  # the window refuses it, too, and says so in its report

    def _why(self, index: int) -> str:
        stored = self._stored(index)
        return "stored, but not for this left context" if stored else "no copy is stored"

    def _admit(self, calibration: Calibration) -> None:
        """Admit segments that the guard lets pass; their probe runs later, in place."""
        chunks = [i for i, item in enumerate(self._order) if isinstance(item, Chunk)]
        if self._on_leave == "exact" or (chunks and len(chunks) != len(self._order) - chunks[0]):
            return  # slots behind a change keep the KV they have
        wanted = [i for i in chunks if self.admissions[i].tier == "none" and self._stored(i)]
        if not wanted:
            return
        with _under(self.window, _loose(self.window.policy)):
            seats = self.window.plan_arrange(self._order).after.seats
        found = list(self.admissions)
        for i in wanted:
            source = seats[i].source
            offer = _Offer(source.guarantee, source.antecedents)
            shared = matched(self._ids[:i], offer.antecedents, self._lengths[:i])
            why = self._forbidden(offer) or calibration.guard(shared)
            if why is not None:
                found[i] = replace(found[i], reason=f"{found[i].reason}: {why}")
                continue
            self._offers[i] = offer
            what = f"its copy shares {shared} tokens of left context, as many as all layers need"
            found[i] = replace(found[i], tier="approximate", guarantee=source.guarantee, reason=what)
        self.admissions = tuple(found)
        if not self._offers:
            return
        # behind approximate KV nothing is exact any more, so prefilled segments are not stored
        first = min(self._offers)
        for i in range(first + 1, len(found)):
            if found[i].tier == "none":
                found[i] = replace(found[i], guarantee=weakest((found[i].guarantee, found[first].guarantee)))
        self.admissions = tuple(found)
        self.cost = self._cost(first)

    def _forbidden(self, offer: _Offer) -> str | None:
        asked = self.window._terms.asked
        if not at_least(offer.guarantee, asked.minimum):
            return f"it would be {offer.guarantee}, the policy's minimum is {asked.minimum}"
        certificate = self.window.certificate
        finding = certificate.findings.get("near") if certificate is not None else None
        if finding is not None and finding.verdict == "unsafe":
            return "the certificate found near KV unsafe"
        return None

    def _cost(self, first: int) -> Cost:
        """Cost with the admitted segments placed and probed; bytes are those of the strict plan."""
        with _under(self.window, _strict(self.window.policy)):
            cost = self.window.plan_arrange(self._order[:first]).cost
        forwards, tokens = cost.forwards, cost.tokens
        for i in range(first, len(self._order)):
            if i in self._offers:
                forwards, tokens = forwards + 1, tokens + len(probed(self._lengths[i]))
            elif self.admissions[i].tier == "none":
                forwards, tokens = forwards + 1, tokens + self._lengths[i]
        return replace(self.cost, forwards=forwards, tokens=tokens)

    def _approximated(self, index: int, calibration: Calibration) -> tuple[list[Report], str | None]:
        """Place one admitted segment and probe it; prefill it if it is refused, with the reason."""
        item, offer = self._order[index], self._offers[index]
        with _under(self.window, _loose(self.window.policy)):
            placed = self.window.arrange([*self.window.slots, item])
        slot = placed.slots[-1]
        why: str | None = "the stored copy has changed since the plan"
        if (slot.guarantee, slot.antecedents) == (offer.guarantee, offer.antecedents):
            with self.window.backbone.measure() as work:
                why = self._probe(calibration)
            placed = replace(
                placed,
                forwards=placed.forwards + work.forwards,
                tokens_recomputed=placed.tokens_recomputed + work.tokens,
            )
        if why is None:
            return [placed], None
        with _under(self.window, _strict(self.window.policy, behind=True)):
            return [placed, self.window.arrange([*self.window.slots[:-1], item])], why

    def _probe(self, calibration: Calibration) -> str | None:
        """The reason to refuse the last slot; None if its KV is like that of a forward in context."""
        window = self.window
        backbone = window.backbone
        assert isinstance(backbone, Backbone), "calibrations are of Hugging Face backbones"
        *before, held = [window.kv(slot) for slot in window.slots]
        last = window._state.residents[-1]
        context = kv_concat([window._stage.live.read(0), *before])
        try:
            cosines = likeness(backbone, last.facts.encoded, last.positions, context, held)
        except UnsupportedBackbone as error:
            return str(error)
        return calibration.refuses(min(cosines))

    def _shown(self, refused: dict[int, str] | None = None) -> tuple[Admission, ...]:
        """The admissions with the guarantees that the window's slots have now."""
        out = []
        for i, (admission, slot) in enumerate(zip(self.admissions, self.window.slots, strict=True)):
            if refused and i in refused:
                admission = replace(admission, tier="none", reason=refused[i])
            out.append(replace(admission, guarantee=slot.guarantee))
        return tuple(out)


@contextmanager
def _under(window: KameraWindow, policy: ReusePolicy) -> Iterator[None]:
    """``window`` serves ``policy`` inside the block: a window has one, and segments differ in theirs."""
    terms = window._terms
    window._terms = replace(terms, served=policy)
    try:
        yield
    finally:
        window._terms = terms


def _strict(policy: ReusePolicy, behind: bool = False) -> ReusePolicy:
    """``policy`` without KV of other left contexts; ``behind`` such KV a minimum of "exact" cannot hold."""
    if policy.minimum == "exact":
        if not behind:
            return policy
        return replace(policy, minimum="patched", withheld=frozenset(GUARANTEES[1:]), max_divergence=None)
    return replace(policy.without({"near", "blind"}), max_divergence=None)


def _loose(policy: ReusePolicy) -> ReusePolicy:
    """The policy under which the planner offers stored KV of any left context."""
    allowed = frozenset(policy.withheld) - {"near", "blind"}
    return replace(policy, minimum="blind", on_miss="prefill", max_divergence=1.0, withheld=allowed)


def _id(item: Item) -> str:
    return item.chunk_id if isinstance(item, Slot) else item.id


def _length(item: Item) -> int:
    return item.length if isinstance(item, Slot) else item.num_tokens


def _summed(reports: Sequence[Report]) -> Report:
    """One report of several steps: their costs added, the slots of the last."""
    last = reports[-1]
    names = ("forwards", "tokens_recomputed", "vision_encodes", "bytes_rotated", "bytes_patched", "seconds")
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return replace(
        last,
        evicted=tuple(slot for report in reports for slot in report.evicted),
        notes=tuple(note for report in reports for note in report.notes),
        **sums,
    )
