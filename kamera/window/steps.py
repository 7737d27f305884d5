"""The parts of a plan, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kamera.engines import Stand
from kamera.ops import PatchBudget
from kamera.patches import Guarantee, Near
from kamera.store import ObjectInfo
from kamera.window.policy import PositionRule
from kamera.window.seats import Offset, Seat, Seats, Spot


class Rows(Protocol):
    """What a plan asks of a `Catalogue`."""

    def has_canonical(self, chunk_id: str) -> bool: ...
    def base(self, chunk_id: str) -> ObjectInfo | None: ...
    def patch_within(
        self,
        chunk_id: str,
        length: int,
        antecedents: Sequence[str],
        kind: str,
        budget: PatchBudget,
        base: str = "",
    ) -> ObjectInfo | None: ...
    def near(self, chunk_id: str, antecedents: Sequence[str], limit: float) -> list[Near]: ...
    def refused(self, chunk_id: str, antecedents: Sequence[str], kind: str, base: str = "") -> bool: ...
    def unkept(self, chunk_id: str) -> bool: ...


class Places(Protocol):
    """Where the model has chunks behind the anchor, given their ids."""

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]: ...
    def behind(self, chunk_ids: Sequence[str]) -> Offset: ...


@dataclass(frozen=True)
class Limits:
    """What a window may hold and reach.

    ``anchor`` its tokens, ``last`` the position from which on there are none. ``check`` raises NotRelocatable
    for a spot where the model turns keys in another way. ``lossy``: canonicals are kept in codes.
    ``standing`` is what stands in the live KV (`kamera.window.writing`), ``phased`` the bytes of a token that
    turn when it moves.
    """

    anchor: int
    last: int
    max_tokens: int | None
    rule: PositionRule
    lossy: bool
    check: Callable[[Spot], None]
    places: Places
    standing: tuple[Stand, ...] = ()
    phased: int = 0


@dataclass(frozen=True)
class Newcomer:
    """A chunk that is to come: its id, its tokens, and how often the vision tower runs for it."""

    chunk_id: str
    length: int
    encodes: int = 0


@dataclass(frozen=True)
class Offer:
    """A stored patch that serves: under which antecedents it is kept, formed how, worth what.

    ``bytes`` are those of its factors as they will be applied; 0 for a patch that the plan itself forms.
    ``base``: the anchor of the canonical that it is added to, "" for the window's own.
    """

    guarantee: Guarantee
    antecedents: tuple[str, ...]
    kind: str
    formed: str | None
    bytes: int = 0
    note: str = ""
    base: str = ""


@dataclass(frozen=True)
class Keep:
    """A chunk stays on the KV it has, perhaps elsewhere or under another guarantee."""

    seat: Seat


@dataclass(frozen=True)
class Place:
    """A chunk is served from its canonical, under a patch if one is named.

    ``computes``: the canonical is prefilled behind the anchor first, and archived.
    """

    seat: Seat
    patch: Offer | None
    computes: bool


@dataclass(frozen=True)
class Prefill:
    """A conditioned forward behind ``before``. ``new``: nobody had seen the chunk."""

    seat: Seat
    before: Seats
    new: bool = False


@dataclass(frozen=True)
class Archive:
    """A chunk's canonical is kept before it leaves or moves; prefilled first if it ``computes``."""

    number: int
    computes: bool


@dataclass(frozen=True)
class Harvest:
    """The patch that a chunk's prefill was the forward of is formed and kept.

    ``base``: against the canonical behind that anchor, "" for the window's own.
    """

    number: int
    base: str = ""


@dataclass(frozen=True)
class Clean:
    """A chunk shows its canonical; prefilled first if it ``computes``."""

    number: int
    computes: bool


Step = Keep | Place | Prefill | Archive | Harvest | Clean


@dataclass(frozen=True)
class Cost:
    """Forwards, tokens they run through the decoder, runs of the vision tower, and bytes written live.

    ``bytes_turned`` are KV bytes that are turned to another position, ``bytes_patched`` those of the patches
    that are applied.
    """

    forwards: int = 0
    tokens: int = 0
    encodes: int = 0
    bytes_turned: int = 0
    bytes_patched: int = 0


@dataclass(frozen=True)
class Plan:
    """An operation: the window before and after it, its steps in order, and their price.

    ``arrived`` is the number of the seat it is about, ``left`` those that leave.
    """

    operation: str
    before: Seats
    after: Seats
    steps: tuple[Step, ...]
    cost: Cost
    arrived: int | None = None
    left: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
