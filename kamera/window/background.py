"""What a window has done in the background beside archives and patches: departures prepared, and audits.

A departure is prepared before it comes: the chunks that stay are placed as that operation will need them.

An audit prefills a share of the KV that was served again, after the answer, and compares. Digests and probes
tell that a model is the one that computed stored KV. What none of them sees (weights written behind PyTorch's
back, an object of a foreign model under an equal key, a kernel that turns wrongly) shows in the KV itself. So
a window hands over slots that it served (`ReusePolicy.audit`), and background work prefills each behind the
KV that stands before it. What it finds is counted in the store's metrics and logged; nothing is withheld.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kamera import forks
from kamera.content import Encoded
from kamera.engines import Engine, Span, Spent
from kamera.errors import KameraError
from kamera.ops import KV, CodedKV, kv_copy, kv_distance, kv_tensors, relocate_kv
from kamera.patches import Former, Priority, Ready, background_of
from kamera.trust import LOSSY, AuditFinding, ReusePolicy, lacking_bound
from kamera.window.plan import Plan
from kamera.window.requests import Append, NamedRequest, Newcomer, Recall, Request, Slide
from kamera.window.run import Executor, Tally
from kamera.window.slots import Resident, Seat, WindowState, holdings_of, memory_held

_ROUNDING = 1e-6

logger = logging.getLogger(__name__)


# -- departures ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Departure:
    """A window ``before`` it and after its ``count`` oldest chunks have left, on a live cache of its own.

    ``plan`` is that of the departure, whose steps have run.
    """

    before: WindowState
    count: int
    plan: Plan
    state: WindowState
    executor: Executor

    def fits(self, request: Request, executor: Executor, state: WindowState, policy: ReusePolicy) -> bool:
        """True if an operation on ``state`` starts where as many chunks have left as it needs."""
        if self.before is not state:
            return False
        match request:
            case Append(content=Newcomer() as chunk) | Recall(chunk=Newcomer() as chunk):
                in_view = isinstance(request, Recall) and chunk.chunk_id in state.seats.chunk_ids
                return not in_view and count_leaving(executor, state, policy, chunk) == self.count
            case Slide(n):
                return n == self.count
            case _:
                return False


def count_leaving(executor: Executor, state: WindowState, policy: ReusePolicy, chunk: Newcomer) -> int:
    """The number of oldest chunks that leave for a chunk; 0 for one that no window of this size holds."""
    view = executor.view(state, {}, policy)
    if view.max_tokens is None or chunk.length > view.max_tokens - view.anchor:
        return 0
    return view.count_leaving(state.seats, chunk)


def depart(
    count: int, state: WindowState, executor: Executor, policy: ReusePolicy
) -> Ready[Departure] | None:
    """The window after a departure; None if no forward is needed."""
    named_request = NamedRequest(Slide(count))
    try:
        with executor.former.operation():
            plan = executor.plan(named_request, state, policy)
            if not plan.cost.tokens:
                return None
            ran, after, _ = executor.run(named_request, state, policy, Tally(), plan)
            executor.show(after)
            queue_audits(executor, after, slots_to_audit(ran, after), policy.audit)
    except KameraError as error:
        logger.info("a window's next departure was not prepared: %s", error)
        return None
    anchor = executor.former.anchor
    old = holdings_of(anchor, state, executor.former.backbone.live())
    own = memory_held(holdings_of(anchor, after, executor.live), [old]).own
    done = replace(plan, steps=(), cost=Spent(), later=Spent())
    return Ready(Departure(state, count, done, after, executor), own)


# -- audits ----------------------------------------------------------------------------------------


class Auditor:
    """Chooses the slots to audit among those that the windows of one backbone serve.

    A share of 0.01 takes one slot of a hundred, once a hundredth of the tokens that were served pays for all
    tokens that audits run; both are counted over all windows, so that short-lived ones are audited too. As
    what is not spent adds up, dear slots get their turn. A share of 1.0 takes every slot, whatever that runs.
    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = forks.Lock()
        self._random = random.Random(0)
        self._slots = self._tokens = 0.0

    def choose(self, candidates: Sequence[tuple[int, int, int]], share: float) -> list[int]:
        """Indices of the slots that are due, of served ones.

        Each of the ``candidates`` is a slot's index, its tokens, and those that its audit runs.
        """
        if share == 1.0:
            return [index for index, _, _ in candidates]
        indices = []
        with self._lock:
            self._slots += share * len(candidates)
            self._tokens += share * sum(tokens for _, tokens, _ in candidates)
            for index, _, price in self._random.sample(list(candidates), len(candidates)):
                if self._slots + _ROUNDING >= 1.0 and self._tokens + _ROUNDING >= price:
                    indices.append(index)
                    self._slots -= 1.0
                    self._tokens -= price
        return sorted(indices)


_auditors: weakref.WeakKeyDictionary[Engine, Auditor] = weakref.WeakKeyDictionary()
_auditors_lock = forks.Lock()


def auditor_of(backbone: Engine) -> Auditor:
    """The auditor of all windows of a backbone in this process."""
    with _auditors_lock:
        return _auditors.setdefault(backbone, Auditor())


def queue_audits(executor: Executor, state: WindowState, served: Sequence[int], share: float) -> None:
    """Audit a ``share`` of the slots ``served`` (indices), shown by ``executor.live``, in the background.

    Survivors are passed over: what has left is no more at hand to prefill them behind. So is what stands
    behind a chunk that shows its clean view, which it never attended to. Audits are the first work to be
    dropped where too much of it waits; the next report says so.
    """
    if not share:
        return

    def note_drop(why: str) -> None:
        executor.former.losses.note_for_next(f"a slot was not audited: {why}")

    clean = next(
        (i for i, seat in enumerate(state.seats.seats) if seat.clean is not None), len(state.encoded)
    )
    auditable = [i for i in served if i <= clean and state.seats.guarantees[i] != "survivor"]
    candidates = []
    for index in auditable:  # each runs itself, its canonical if it is served from one, and the anchor
        seat, anchor = state.seats.seats[index], executor.former.anchor.length if index == 0 else 0
        candidates.append((index, seat.length, seat.length * (1 + seat.shown.canonical) + anchor))
    queue = background_of(executor.former.backbone)
    for index in auditor_of(executor.former.backbone).choose(candidates, share):
        kv = kv_copy(executor.live.read(index + 1))
        spans = executor.spans(state)[: index + 1]
        holds = [*kv_tensors(kv), *(t for span in spans for t in kv_tensors(span.kv))]
        executor.former.store.awaited[id(queue)] = queue.flush  # no work meets a closed store
        queue.add(partial(audit_and_tell, executor, state, index, kv), Priority.AUDIT, holds, note_drop)


def slots_to_audit(plan: Plan, state: WindowState) -> list[int]:
    """Indices of the slots that an operation placed, prefilled or moved."""
    old_seats = {seat.number: seat for seat in plan.before.seats}
    return [i for i, seat in enumerate(state.seats.seats) if old_seats.get(seat.number) is not seat]


def audit_and_tell(executor: Executor, state: WindowState, index: int, kv: KV) -> None:
    """Audit the slot at ``index`` that was served as ``kv``; count and log an error beyond its bound."""
    former = executor.former
    if former.backbone.fingerprint != former.context.fingerprint:
        return  # a change that was seen refuses by itself
    try:
        findings = audit_slot(executor, state, index, kv)
    except (KameraError, torch.OutOfMemoryError) as error:
        logger.warning("an audit could not be made: %s", error)
        return
    wrong = next((finding for finding in findings if not finding.holds), None)
    if metrics := former.store.metrics:
        metrics.count("kamera_audits", "right" if wrong is None else "wrong")
    if wrong is not None:
        logger.error("%s", wrong)


def audit_slot(executor: Executor, state: WindowState, index: int, kv: KV) -> list[AuditFinding]:
    """Prefill a served slot again and measure it. Raises the errors of forwards."""
    former = executor.former
    seat, resident, guarantee = (
        state.seats.seats[index],
        state.residents[index],
        state.seats.guarantees[index],
    )
    rounding, source = former.backbone.identity.tolerance, seat.shown
    finding = partial(AuditFinding, seat.chunk_id, guarantee)
    findings = [finding("system prompt", _anchor_error(former), rounding)] if index == 0 else []
    if source.canonical:
        error = _canonical_error(former, resident)
        lossy = resident.shown.lossy or isinstance(resident.shown.kv, CodedKV)
        findings += [] if error is None else [finding("canonical", error, LOSSY if lossy else rounding)]
    live = former.backbone.live()
    live.show(executor.spans(state)[: index + 1], room=seat.length)
    true = former.backbone.prefill([resident.encoded], [state.positions[index]], live)[0]
    kv_error = kv_distance(kv, true)
    if guarantee == "exact":
        return [*findings, finding("KV", kv_error, rounding)]
    if source.canonical:
        missing_share = _lacking(former, resident.moved(seat), kv, true)
        bound = lacking_bound(
            guarantee, _energy(former, seat, resident.shown) if guarantee == "patched" else None
        )
        if bound is not None and missing_share is not None:
            findings.append(finding("patch", missing_share, bound))
    return findings


def _anchor_error(former: Former) -> float:
    anchor = former.anchor
    true = former.backbone.prefill([Encoded(anchor.input_ids)], [anchor.positions])[0]
    return kv_distance(anchor.kv, true)


def _canonical_error(former: Former, resident: Resident) -> float | None:
    """Of the canonical that is served, against one prefilled now; None behind another system prompt."""
    span, encoded = resident.shown, resident.encoded
    positions = former.canonical_positions(encoded)
    if not torch.equal(positions, span.positions):
        return None
    live = former.backbone.live()
    live.show([former.anchor_span], room=encoded.num_tokens)
    return kv_distance(span.kv, former.backbone.prefill([encoded], [positions], live)[0])


def _lacking(former: Former, canonical: Span, served: KV, true: KV) -> float | None:
    """Share of the deficit's energy that ``served`` lacks of ``true``; None if there was no deficit."""
    blind = relocate_kv(kv_copy(canonical.kv), former.backbone.layout, canonical.offset)
    deficit, remainder, size = 0.0, 0.0, 0.0
    for true_part, served_part, blind_part in zip(true.parts, served.parts, blind.parts, strict=True):
        for name, tensor in true_part.items():
            deficit += float((blind_part[name].double() - tensor.double()).square().sum())
            remainder += float((served_part[name].double() - tensor.double()).square().sum())
            size += float(tensor.double().square().sum())
    # a deficit of rounding size says nothing about a patch
    floor = former.backbone.identity.tolerance**2 * size
    return None if deficit <= floor else max(0.0, remainder - floor) / deficit


def _energy(former: Former, seat: Seat, span: Span) -> float | None:
    """Share of the deficit's energy that the stored patch says it keeps; None unless all of it is served."""
    try:
        record = former.store.get_patch(former.context, seat.chunk_id, seat.shown.antecedents)
    except KameraError:
        return None
    if record is None or span.patch is None or record.patch.rank != span.patch.rank:
        return None
    energy = record.info.get("energy")
    return float(energy) if isinstance(energy, int | float) else None
