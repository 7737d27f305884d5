"""Decides how one chunk is served at its place: from rows and policy, the steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from kamera.errors import PolicyRefused
from kamera.patches import Catalogue, by_form, possible_names, worth_harvesting
from kamera.store import ObjectInfo, chunks_of
from kamera.trust import Guarantee, ReusePolicy, prefilled_behind
from kamera.window.heads import head_in, take_over
from kamera.window.offers import Offers
from kamera.window.requests import Arrange, Newcomer, Request
from kamera.window.seating import canonical_source
from kamera.window.seats import Offer, Seat, Seats, Source, Spot, footing, new_number, staying_behind
from kamera.window.steps import (
    Archive,
    Clean,
    Cost,
    Follow,
    Harvest,
    Limits,
    Place,
    Prefill,
    Reason,
    Step,
)


@dataclass
class Placer:
    """Places one chunk of a plan. Objects that the plan itself will have stored count as stored."""

    request: Request
    before: Seats
    rows: Catalogue
    policy: ReusePolicy
    limits: Limits
    patches: bool  # whether any is formed
    steps: list[Step] = field(default_factory=list)
    late_steps: list[Archive | Harvest | Follow] = field(default_factory=list)  # steps that are later work
    left_numbers: list[int] = field(default_factory=list)
    late_seats: dict[str, Seat] = field(default_factory=dict)  # chunks whose canonicals later work computes
    heads: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    _new_ids: set[str] = field(default_factory=set)
    _first_ids: set[str] = field(default_factory=set)  # canonicals at hand that later work puts first
    _followed: list[Seat] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _formed: dict[tuple[str, tuple[str, ...], str], Guarantee] = field(default_factory=dict)

    def archive_leaving(self, seat: Seat) -> Seat:
        """Archive a chunk that leaves: now with the patch of its prefill, or its canonical as later work."""
        if self.policy.forms == "always":
            return self.archive(seat)
        if isinstance(self.request, Arrange) and not self.request.archive:
            return seat
        if seat.archived and seat.chunk_id not in self.rows.losses.unkept:
            return seat
        if self.base(seat.chunk_id) is None and not self.rows.has_canonical(seat.chunk_id):
            self.leave_canonical_for_later(seat)
        return replace(seat, archived=True)

    def leave_canonical_for_later(self, seat: Seat) -> None:
        """Leave the canonical of a chunk to later work."""
        self.late_steps.append(Archive(seat.number, later=True))
        self.late_seats[seat.chunk_id] = seat

    def archive(self, seat: Seat) -> Seat:
        """Archive a chunk: its canonical, and the patch of its prefill."""
        if seat.archived and seat.chunk_id not in self.rows.losses.unkept:
            return seat
        if self.base(seat.chunk_id) is None:
            self.steps.append(Archive(seat.number, self._compute(seat)))
        self._harvest(seat)
        return replace(seat, archived=True)

    def stay(self, seat: Seat, before: Seats) -> Seat:
        """A chunk that stays while its antecedents change, on the best KV at hand: no forward runs.

        Leading it is served from its canonical, behind chunks for which just a patch is stored with that.
        Where more than `ReusePolicy.max_departed` of its antecedents has left, it is served with the patch
        behind its own predecessor. Else it is a survivor.
        """
        kept = staying_behind(seat, before)
        stands = seat.source.antecedents == before.lineage
        if stands or seat.clean is not None or self.policy.minimum == "exact":
            return kept
        source = self._at_hand(seat, before)
        if source is None or source.home.offset(seat.spot) is None:
            return kept
        if source.patch is not None and source.patch == seat.source.patch:
            return seat.relabel(source.guarantee)
        placed = replace(seat, source=source, guarantee=source.guarantee, formed="exact")
        self.steps.append(Place(placed))
        return placed

    def _at_hand(self, seat: Seat, before: Seats) -> Source | None:
        """Stored KV of a chunk that is better behind ``before`` than a survivor's."""
        if not (self.rows.has_canonical(seat.chunk_id) or seat.chunk_id in self._new_ids):
            return None
        if not before.seats:
            return canonical_source(self.limits, seat.chunk_id, lossy=self.limits.lossy)
        canonical = canonical_source(self.limits, seat.chunk_id)
        offer = self._offers.behind(seat, before)
        if offer is not None:
            return canonical.with_patch(offer, before.tokens)
        last = before.seats[-1]
        if seat.source.departed(before.lengths) > self.policy.max_departed:
            offer = self._offers.alone(seat, last.chunk_id)
        return None if offer is None else canonical.with_patch(offer, last.length)

    def follow(self, seats: Seats, index: int) -> None:
        """Have the patch of the chunk at ``index`` behind its predecessor formed in the background.

        Only of one that two chunks stand before: the others will lead, or lead already.
        """
        if index < 2 or not self.policy.follows or self.limits.lossy:
            return
        seat, predecessor = seats.seats[index], seats.seats[index - 1]
        names = (predecessor.chunk_id,)
        if seat.chunk_id in (*self.limits.glue, *names) or not (
            self._is_made(seat) and self._is_made(predecessor)
        ):
            return
        if (seat.chunk_id, names) not in self.rows.followed and self.rows.patch(
            seat.chunk_id, names, "exact"
        ) is None:
            self.late_steps.append(Follow(seat.number, predecessor.number))
            self._followed.append(seat)

    def _is_made(self, seat: Seat) -> bool:
        """True if a chunk's canonical is stored, or background work makes it."""
        made = (*self._new_ids, *self._first_ids, *self.late_seats, *self.limits.pending)
        return seat.chunk_id in made or self.rows.has_canonical(seat.chunk_id)

    def switch(self, seat: Seat, on: bool) -> Seat:
        """The chunk conditioned, or showing its canonical, at its present place."""
        if on:
            return replace(seat, clean=None)
        self.steps.append(Clean(seat.number, self._compute(seat)))
        return replace(seat, clean=canonical_source(self.limits, seat.chunk_id))

    def place_chunk(self, chunk: Newcomer | Seat, before: Seats, spot: Spot, archived: bool = True) -> Seat:
        """Place a chunk behind ``before`` by the best means the policy admits.

        Of one of the window, KV prefilled behind the very same exact antecedents is reused as it is, and a
        clean view stays one. ``archived``: what is known of a newcomer.
        """
        source, old = self.best_source(chunk, before), chunk if isinstance(chunk, Seat) else None
        number = new_number() if old is None else old.number
        if old is not None and source is old.source:
            seat = replace(old, spot=spot, guarantee=source.guarantee, formed="exact", clean=None)
        elif source is not None and self._leads(chunk, before, spot, source):
            home = None if any(before.frame) else source
            why: Reason = "new" if old is None else "no canonical"
            seat = self._prefill(chunk, before, spot, number=number, leading=home, reason=why)
            if home is not None:
                self.late_steps.append(Archive(seat.number, later=True))
                self._first_ids.add(seat.chunk_id)
                seat = replace(seat, archived=True)
        elif source is not None:
            seat = Seat(chunk.chunk_id, chunk.length, spot, source, source.guarantee, number=number)
            self.steps.append(Place(seat, 0 if source.patch and source.patch.base else self._compute(chunk)))
        else:
            archived, reason = archived if old is None else old.archived, self._reason(chunk, before)
            seat = self._prefill(chunk, before, spot, archived=archived, number=number, reason=reason)
            if self.policy.on_miss == "form":
                self._miss(seat)
        return seat if old is None or old.clean is None else self.switch(seat, False)

    # -- inside --------------------------------------------------------------------------------

    @property
    def _offers(self) -> Offers:
        return Offers(self.rows, self.policy, self._formed)

    def best_source(self, chunk: Newcomer | Seat, before: Seats) -> Source | None:
        """The best KV that is admitted: that in the window, or a canonical; None if a forward is needed."""
        base, glue = self.base(chunk.chunk_id), chunk.chunk_id in self.limits.glue
        glue &= base is None and (
            self.policy.minimum == "exact" or not self.rows.has_canonical(chunk.chunk_id)
        )
        if not before.seats and base is None and not glue:
            has_canonical = self.rows.has_canonical(chunk.chunk_id) or chunk.chunk_id in self._new_ids
            source = canonical_source(self.limits, chunk.chunk_id, lossy=self.limits.lossy and has_canonical)
            return source if self.policy.admits(source.guarantee) else None
        state = footing(before)
        own = chunk.source if isinstance(chunk, Seat) and not chunk.source.canonical else None
        if own and own.antecedents == before.lineage and own.guarantee == state == "exact":
            return own
        if glue:
            return None  # nothing of it is stored
        if self.policy.minimum != "exact":
            offer = self._offers.best(chunk, before, base)
            if offer is not None:
                return canonical_source(self.limits, chunk.chunk_id, base=base).with_patch(
                    offer, _behind(offer, before)
                )
        # with a base there is no canonical to serve blind: computing one costs as much as the exact forward
        if base is None and (self.policy.admits("blind") or self.policy.on_miss == "blind"):
            return replace(canonical_source(self.limits, chunk.chunk_id), guarantee="blind")
        return None

    def _reason(self, chunk: Newcomer | Seat, before: Seats) -> Reason:
        """Why no stored KV serves a chunk behind ``before``, by the rows that `best_source` looked at."""
        policy, rows = self.policy, self.rows
        if not policy.moves:
            return "policy"
        if chunk.chunk_id in self.limits.glue:
            return "glue"
        base = self.base(chunk.chunk_id)
        anchor = "" if base is None else base.context.anchor
        if base is None and not rows.has_canonical(chunk.chunk_id):
            return "no canonical"
        antecedents = before.chunk_ids
        if rows.has_refused(chunk.chunk_id, antecedents, "exact", anchor):
            return "refused"
        return "no patch" if rows.patch(chunk.chunk_id, antecedents, "exact", anchor) is None else "budget"

    def _prefill(
        self,
        chunk: Newcomer | Seat,
        before: Seats,
        spot: Spot,
        new: bool = False,
        archived: bool = False,
        number: int | None = None,
        leading: Source | None = None,
        reason: Reason = "",
    ) -> Seat:
        """Plan a conditioned forward. Raises PolicyRefused if it is less than a minimum of "exact".

        ``leading``: the source of a canonical, which the forward behind the anchor alone makes.
        """
        state = footing(before)
        guarantee = prefilled_behind(state)
        if self.policy.minimum == "exact" and guarantee != "exact":
            raise PolicyRefused(
                f"the window serves exact KV only, but holds {state} KV before this place: switch "
                "conditioning on (condition(slot, True)), or let it serve less (the policy's minimum)"
            )
        source = leading or Source(spot, before.lineage, guarantee, canonical=False, behind=before.tokens)
        number = number or new_number()
        seat = Seat(chunk.chunk_id, chunk.length, spot, source, guarantee, state, archived, number=number)
        text_heads = self.heads.get(chunk.chunk_id)
        head = head_in(self.before, text_heads, before, spot) if text_heads else None
        is_joined = head is None and self._shares_forward_behind(before)
        heads = () if head is None else (head,)
        self.steps.append(Prefill(seat, before, new, heads, is_joined, reason))
        return seat

    def _take(self, chunk: Newcomer, before: Seats, spot: Spot) -> Seat | None:
        """A text on the KV of texts that left in its place, unless it is stored."""
        step = take_over(self.before, chunk, before, spot, self.policy)
        is_stored = self.rows.has_canonical(chunk.chunk_id) or chunk.chunk_id in self._new_ids
        if step is None or (is_stored and self.best_source(chunk, before) is not None):
            return None
        self.steps.append(step)
        return step.seat

    def _leads(self, chunk: Newcomer | Seat, before: Seats, spot: Spot, source: Source) -> bool:
        """True for a leading chunk that is prefilled in place: without a frame that is its canonical."""
        if self.policy.forms != "returning" or source.patch or before.seats or self.limits.lossy:
            return False
        if chunk.chunk_id in self._new_ids or self.rows.has_canonical(chunk.chunk_id):
            return False
        heads = self.heads.get(chunk.chunk_id, ())
        head = head_in(self.before, heads, before, spot) if heads else None
        stored_tokens = next((n for other, n in heads if self.rows.has_canonical(other)), 0)
        return stored_tokens <= (0 if head is None else head.tokens)

    def _shares_forward_behind(self, before: Seats) -> bool:
        """True if the step before prefills the chunk right in front, so that both share a forward."""
        last = self.steps[-1] if self.steps and self.limits.joins else None
        if not isinstance(last, Prefill) or not last.tokens:
            return False  # nothing runs for a chunk whose KV is all at hand
        return last.seat.number == before.seats[-1].number

    def _spend(self, seat: Seat) -> Seat:
        """A chunk whose KV is about to be replaced; the patch of its prefill is harvested first."""
        return self.archive(seat) if self.policy.forms == "always" else seat

    def _miss(self, seat: Seat) -> None:
        """A stored chunk was prefilled for want of a patch: form it, now or in the background."""
        forms_now = self.policy.forms == "always"
        if forms_now or self.policy.minimum != "exact":
            self._harvest(seat, later=not forms_now)

    def _harvest(self, seat: Seat, later: bool = False) -> None:
        """Store the patch of a chunk's prefill, unless a better one is stored."""
        if seat.source.canonical or seat.chunk_id in self.limits.glue or not self.patches:
            return  # nothing was prefilled, or nothing is kept of it
        antecedents, formed = seat.source.antecedents, seat.formed
        base_row = self.base(seat.chunk_id)
        base = "" if base_row is None else base_row.context.anchor
        offers = self._offers
        stored_patches = (offers.find(seat, names, base) for names in possible_names(antecedents))
        if worth_harvesting(stored_patches, antecedents, formed, leading=bool(base)):
            if later:
                self.late_steps.append(Harvest(seat.number, base, later=True))
                if not (base or self.rows.has_canonical(seat.chunk_id)):
                    self.late_seats[seat.chunk_id] = seat
                return  # it is not there yet for the rest of this plan
            # a patch is formed against the canonical, which is made if missing
            self.steps.append(Harvest(seat.number, base, 0 if base else self._compute(seat)))
            self._formed[seat.chunk_id, antecedents, base] = formed

    def base(self, chunk_id: str) -> ObjectInfo | None:
        """The canonical behind another anchor to which patches of this window are added.

        None if the window has one of its own, or serves exact KV only.
        """
        if self.policy.minimum == "exact" or chunk_id in self._new_ids or self.rows.has_canonical(chunk_id):
            return None
        return self.rows.base(chunk_id)

    def _compute(self, chunk: Newcomer | Seat) -> int:
        """Tokens that run for the canonical, if it is missing; from now on it counts as stored."""
        if chunk.chunk_id in self._new_ids or self.rows.has_canonical(chunk.chunk_id):
            return 0
        tokens = chunk.length - self._stored_head_tokens(chunk, self._new_ids)
        self._new_ids.add(chunk.chunk_id)
        return tokens

    def later_cost(self) -> Cost:
        """The cost of the canonicals that are left to later work: those of one form run in one forward."""
        canonical_ids = self._new_ids | self.limits.pending
        seats = [seat for seat in self.late_seats.values() if seat.chunk_id not in canonical_ids]
        tokens = [s.length - self._stored_head_tokens(s, canonical_ids | self._first_ids) for s in seats]
        run_seats = [seat for seat, count in zip(seats, tokens, strict=True) if count]
        form = self.limits.places.form
        groups = by_form((form(s.chunk_id), s.length, s) for s in run_seats) if run_seats[1:] else run_seats
        followed = [seat.length for seat in self._followed]
        return Cost(len(groups) + len(followed), sum(tokens) + sum(followed))

    def _stored_head_tokens(self, chunk: Newcomer | Seat, canonical_ids: Collection[str]) -> int:
        """First tokens of a canonical that are taken over from another one, stored or made before it."""
        heads = () if self.limits.lossy else self.heads.get(chunk.chunk_id, ())
        return next((n for other, n in heads if other in canonical_ids or self.rows.has_canonical(other)), 0)


def _behind(offer: Offer, before: Seats) -> int:
    """The tokens of an offer's antecedents; 0 if they are others than those before it."""
    return before.tokens if sorted(chunks_of(offer.antecedents)) == sorted(before.chunk_ids) else 0
