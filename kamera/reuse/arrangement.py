"""Arrangements: chunks to be shown in a window, each with its tier; planned first, run by the window.

The window's own planner decides between kept, patched and prefilled chunks. What it would prefill although
a copy is stored may be served `approximate`: under a calibration, one chunk at a time, each probed in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from kamera.content import Chunk, Encoded
from kamera.errors import CorruptChunk, StoreError, UnsupportedBackbone, WrongKey
from kamera.ops import kv_concat
from kamera.patches import equal_left
from kamera.reuse.admission import Admission, tier_of
from kamera.reuse.calibration import Calibration, modality
from kamera.reuse.prefetch import Load, Prefetch
from kamera.reuse.probe import likeness, probed
from kamera.reuse.terms import loose, serves_moved, strict
from kamera.trust import Guarantee, OnLeave, ReusePolicy, at_least, weakest
from kamera.window import Arrange, Cost, KameraWindow, Offer, Plan, Report, Slot

Item = Slot | Chunk


@dataclass(frozen=True)
class _Offer:
    """The stored KV that an approximate segment would be served from."""

    guarantee: Guarantee
    antecedents: tuple[str, ...]


class Outcome(NamedTuple):
    """A run arrangement: the window's report, summed over its steps, and the admissions as they came out.

    ``answer``: to a question that was asked in the same forward.
    """

    report: Report
    admissions: tuple[Admission, ...]
    answer: str | None = None


class Arrangement:
    """The plan of `kamera.window.Arrange`, with the tier of each chunk and approximate ones admitted.

    ``admissions`` are in order; ``cost`` is exact if no segment is refused by its probe, each refusal adds
    one prefill. Without a ``calibration`` nothing approximate is served, whatever the policy's minimum.
    ``among`` as in `kamera.window.Arrange`; ``plan`` is that of the order under `strict`, if it is made.
    Canonicals of the ``recurring`` chunks, by id, that are prefilled are made as later work, if policy and
    calibration may serve them behind other chunks. ``later`` is the cost of all later work but proofs.
    Raises CertificateMismatch for a calibration of another backbone, and the refusals of
    `KameraWindow.plan`.
    """

    def __init__(
        self,
        window: KameraWindow,
        order: Sequence[Item],
        *,
        on_leave: OnLeave = "repair",
        calibration: Calibration | None = None,
        among: Sequence[Chunk] = (),
        plan: Plan | None = None,
        recurring: Sequence[str] = (),
    ) -> None:
        self.window = window
        self._order = tuple(order)
        self._on_leave: OnLeave = on_leave
        self._calibration = calibration
        self._among = tuple(among)
        if calibration is not None:
            calibration.check(window.backbone)
        self._again = frozenset(recurring)
        self._recurring = tuple(recurring) if serves_moved(window, calibration) else ()
        self._plan = plan or window.plan(
            Arrange(self._order, on_leave, self._among, archive=False, recurring=self._recurring),
            policy=strict(window.policy),
        )
        plan = self._plan
        self._ids = tuple(_id(item) for item in self._order)
        self._lengths = tuple(_length(item) for item in self._order)
        self._offers: dict[int, _Offer] = {}
        self.cost, self.later = plan.cost, plan.later
        self._loads = tuple(load for chunk_id, offer in plan.loads for load in _loads(chunk_id, offer))
        held = {seat.number: seat.source for seat in plan.before.seats}
        self._patched: set[int] = set()
        found: list[Admission] = []
        at = window.anchor.length
        for i, (seat, worth) in enumerate(zip(plan.after.seats, plan.after.worths, strict=True)):
            tier, source, head = tier_of(worth), seat.source, plan.heads.get(seat.number, 0)
            if head == seat.length:
                reason = f"{worth}: the first tokens of a segment that the window holds"
            elif held.get(seat.number) == source:
                reason = f"{worth}: held by the window"
            elif source.patched:
                self._patched.add(i)
                reason = f"{worth}: a stored patch for this left context"
            elif source.sample is not None:
                reason = (
                    f"{worth}: {source.sample.tokens} of its {seat.length} tokens run for this left context"
                )
            elif source.canonical and self._stored(i):
                reason = f"{worth}: leads the prompt, as its stored copy does"
            else:
                tier, reason = "none", self._why(i)
                reason += f"; the window holds its first {head} tokens" if head else ""
            found.append(Admission(at, at + seat.length, seat.chunk_id, tier, worth, reason, head))
            at += seat.length
        self.admissions = tuple(found)
        if calibration is not None:
            self._admit(calibration)

    def prefetch(self) -> Prefetch:
        """Begin to read the stored objects that `run` will place, in the background."""
        return Prefetch(self.window.store, self.window.context, self._loads)

    def run(self, question: torch.Tensor | None = None, options: Mapping[str, Any] | None = None) -> Outcome:
        """Bring the window to the arrangement. After an error the window may hold a part: use a fork.

        With ``options`` it answers ``question`` (token ids) too, unless approximate segments are probed.
        """
        if not self._offers and question is not None and options is not None:
            answer, report = self.window.respond(question, self._plan, **options)
            return Outcome(report, self._shown(), str(answer))
        if not self._offers:
            return Outcome(self.window.run(self._plan), self._shown())
        assert self._calibration is not None
        first = min(self._offers)
        reports = [self._arrange(self._order[:first], strict(self.window.policy), self._among)]
        behind = strict(self.window.policy, behind=True)
        refused: dict[int, str] = {}
        for run in self._runs(first):
            if run[0] in self._offers:
                done, why = self._approximated(run, self._calibration)
                reports += done
                refused |= why
                continue
            reports.append(self._arrange([*self.window.slots, *(self._order[i] for i in run)], behind))
        return Outcome(_summed(reports), self._shown(refused))

    # -- inside --------------------------------------------------------------------------------

    def _arrange(self, order: Sequence[Item], policy: ReusePolicy, among: Sequence[Chunk] = ()) -> Report:
        request = Arrange(order, among=among, archive=False, recurring=self._recurring)
        return self.window.run(self.window.plan(request, policy=policy))

    def _stored(self, index: int) -> bool:
        try:
            return self.window.store.info(self.window.context, self._ids[index]) is not None
        except (CorruptChunk, WrongKey, StoreError):
            return False  # the window refuses it, too, and says so in its report

    def _why(self, index: int) -> str:
        if self._stored(index):
            return "stored, but not for this left context"
        came = self._ids[index] in self._again
        return "it came before, but no copy of it by itself is stored" if came else "no copy is stored"

    def _admit(self, calibration: Calibration) -> None:
        """Admit segments that the guard lets pass; their probe runs later, in place."""
        chunks = [i for i, item in enumerate(self._order) if isinstance(item, Chunk)]
        if self._on_leave == "exact" or (chunks and len(chunks) != len(self._order) - chunks[0]):
            return  # slots behind a change keep the KV they have
        wanted = [i for i in chunks if self.admissions[i].tier == "none" and self._stored(i)]
        if not wanted:
            return
        seats = self.window.plan(Arrange(self._order), policy=loose(self.window.policy)).after.seats
        found = list(self.admissions)
        for i in wanted:
            source = seats[i].source
            offer = _Offer(source.guarantee, source.antecedents)
            shared = equal_left(self._ids[:i], offer.antecedents, self._lengths[:i])
            item = self._order[i]
            assert isinstance(item, Chunk), "slots keep the KV they have"
            outside = calibration.outside(item, self._modalities[:i])
            why = self._forbidden(offer) or outside or calibration.guard(shared)
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

    @cached_property
    def _modalities(self) -> list[str]:
        """The modality of each item."""
        ids, vision = self.window.input_ids, torch.tensor(self.window.backbone.vision_tokens)
        found = []
        for item in self._order:
            if isinstance(item, Chunk):
                found.append(modality(item))
            else:
                shown = torch.isin(ids[item.start : item.start + item.length], vision)
                found.append("media" if bool(shown.any()) else "text")
        return found

    def _forbidden(self, offer: _Offer) -> str | None:
        asked = self.window.terms.asked
        if not at_least(offer.guarantee, asked.minimum):
            return f"it would be {offer.guarantee}, the policy's minimum is {asked.minimum}"
        certificate = self.window.terms.certificate
        finding = certificate.findings.get("near") if certificate is not None else None
        if finding is not None and finding.verdict == "unsafe":
            return "the certificate found near KV unsafe"
        return None

    def _cost(self, first: int) -> Cost:
        """Cost with the admitted segments placed and probed; bytes are those of the strict plan."""
        head = self._order[:first]
        request = Arrange(head, among=self._among, archive=False, recurring=self._recurring)
        cost = self.window.plan(request, policy=strict(self.window.policy)).cost
        forwards, tokens = cost.forwards, cost.tokens
        forwards += sum(run[0] in self._offers for run in self._runs(first))
        for i in range(first, len(self._order)):
            if i in self._offers:
                tokens += len(probed(self._lengths[i]))
            elif self.admissions[i].tier == "none":
                joined = self.window.backbone.joins and self.admissions[i - 1].tier == "none"
                forwards, tokens = forwards + (not joined), tokens + self._lengths[i]
        return replace(self.cost, forwards=forwards, tokens=tokens)

    def _runs(self, first: int) -> list[range]:
        """The items from ``first`` on, in runs placed at once: admitted texts, one picture, others."""
        runs: list[range] = []
        kind: object = None
        for i in range(first, len(self._order)):
            item = self._order[i]
            alone = isinstance(item, Chunk) and item.has_media and i in self._offers
            same = kind == (i in self._offers) and not alone
            runs.append(range(runs.pop().start if same else i, i + 1))
            kind = None if alone else i in self._offers
        return runs

    def _approximated(
        self, run: Sequence[int], calibration: Calibration
    ) -> tuple[list[Report], dict[int, str]]:
        """Place admitted segments and probe them in one forward; the reasons for those that are refused.

        A refused segment is prefilled; as that changes the context of those behind it, they are probed again.
        """
        behind = self.window.slots
        placed = self._arrange([*behind, *(self._order[i] for i in run)], loose(self.window.policy))
        refused = dict.fromkeys(run, "the stored copy has changed since the plan")
        offers = [_Offer(slot.guarantee, slot.antecedents) for slot in placed.slots[-len(run) :]]
        if offers == [self._offers[i] for i in run]:
            with self.window.backbone.measure() as work:
                found = self._probe(len(run), calibration)
            refused = {i: why for i, why in zip(run, found, strict=True) if why is not None}
            placed = replace(
                placed,
                forwards=placed.forwards + work.forwards,
                tokens_recomputed=placed.tokens_recomputed + work.tokens,
            )
        if not refused:
            return [placed], {}
        reports = [placed]
        rest = [] if len(run) > 1 else [self._order[run[0]]]
        again = [*self.window.slots[: len(behind)], *rest]
        reports.append(self._arrange(again, strict(self.window.policy, behind=True)))
        if len(run) > 1:
            refused = {}
            for i in run:
                done, why = self._approximated([i], calibration)
                reports += done
                refused |= why
        return reports, refused

    def _probe(self, count: int, calibration: Calibration) -> list[str | None]:
        """The reason to refuse each of the last ``count`` slots; None if its KV is as in context."""
        window = self.window
        backbone = window.backbone
        spans = window.shown()
        last = spans[-count:]
        context = kv_concat([span.kv for span in spans[:-count]])
        encoded = [span.encoded for span in last]
        whole = encoded[0]
        if count > 1:  # texts
            whole = Encoded(torch.cat([e.input_ids for e in encoded]), {}, {})
        starts = list(accumulate((e.num_tokens for e in encoded[:-1]), initial=0))
        rows = [probed(e.num_tokens) + start for e, start in zip(encoded, starts, strict=True)]
        positions = torch.cat([span.positions for span in last], dim=1)
        held = kv_concat([span.kv for span in last])
        try:
            cosines = likeness(backbone, whole, positions, context, held, torch.cat(rows))
        except UnsupportedBackbone as error:
            return [str(error)] * count
        parts = cosines.split([len(r) for r in rows], dim=1)
        return [calibration.refuses(float(part.min())) for part in parts]

    def _shown(self, refused: dict[int, str] | None = None) -> tuple[Admission, ...]:
        """The admissions with the guarantees that the window's slots have now."""
        out = []
        for i, (admission, slot) in enumerate(zip(self.admissions, self.window.slots, strict=True)):
            if refused and i in refused:
                admission = replace(admission, tier="none", reason=refused[i])
            elif i in self._patched and slot.rank is None:
                admission = replace(admission, tier="none", reason="the stored patch was refused")
            out.append(replace(admission, guarantee=slot.guarantee))
        return tuple(out)


def _loads(chunk_id: str, offer: Offer | None) -> list[Load]:
    """The objects that a chunk is placed from."""
    based = offer is not None and bool(offer.base)
    loads = [] if based else [Load(chunk_id)]
    if offer is not None:
        loads.append(Load(chunk_id, offer.antecedents, offer.kind, offer.base))
    return loads


def _id(item: Item) -> str:
    return item.chunk_id if isinstance(item, Slot) else item.id


def _length(item: Item) -> int:
    return item.length if isinstance(item, Slot) else item.num_tokens


def _summed(reports: Sequence[Report]) -> Report:
    """One report of several steps: their costs added, the slots of the last."""
    last = reports[-1]
    tokens = ("tokens_recomputed", "tokens_held")
    names = ("forwards", *tokens, "vision_encodes", "bytes_rotated", "bytes_patched", "seconds")
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return replace(
        last,
        evicted=tuple(slot for report in reports for slot in report.evicted),
        notes=tuple(note for report in reports for note in report.notes),
        **sums,
    )
