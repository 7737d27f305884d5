"""The parts of a plan, its inputs, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import eq
from typing import Any, Literal, Protocol, get_type_hints

import cattrs
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from kamera.engines import PositionLimits
from kamera.errors import quote
from kamera.patches import Catalogue
from kamera.trust import ReusePolicy
from kamera.window.requests import Append, Arrange, Condition, Evict, Newcomer, Recall, Request
from kamera.window.seats import Offset, Seat, Seats, Spot

Reason = Literal["", "new", "edited", "policy", "glue", "no canonical", "no patch", "refused", "budget"]
"""Why a chunk runs although stored KV could serve.

It was never seen. It begins as another text, and its end is new. The policy serves no stored patch. It is a
text too short to keep. No canonical is stored, or no patch behind these antecedents. The patch was refused,
or is smaller, or leaves out more, than the policy asks. "" for none of these: its KV was not to be had.
"""


class Places(Protocol):
    """Positions of chunks behind the anchor, given their ids, and their ``form`` as in `form_of`."""

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]: ...
    def form(self, chunk_id: str) -> Hashable | None: ...


@dataclass(frozen=True)
class Limits:
    """The limits of a window.

    ``anchor`` is the number of its tokens, ``reach`` as `Engine.limits`. ``lossy``: canonicals are stored in
    codes. ``joins`` as in `ModelFacts`. ``glue`` are the ids of texts that are glue (`is_glue`), in a request
    whose chunks are parts of a conversation. Background work that waits already makes the canonicals of
    ``pending``.
    """

    anchor: int
    reach: PositionLimits
    max_tokens: int | None
    lossy: bool
    places: Places
    joins: bool = False
    glue: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()


@dataclass(frozen=True)
class View:
    """What a plan is made from, beside its request: a window's seats, stored rows, a policy, and limits."""

    seats: Seats
    rows: Catalogue
    policy: ReusePolicy
    limits: Limits


@dataclass(frozen=True)
class Place:
    """A chunk is served from its canonical, with the patch of its source if there is one.

    ``tokens`` run first, behind the anchor, for a canonical that is missing; it is archived.
    """

    seat: Seat
    tokens: int = 0


@dataclass(frozen=True)
class TextHead:
    """KV of a chunk's next ``tokens``: that of the first of the chunk in seat ``number`` before an operation.

    It is moved by ``offset`` positions per axis from where it was computed; () for none.
    """

    number: int
    tokens: int
    offset: Offset = ()


@dataclass(frozen=True)
class Prefill:
    """A conditioned forward behind ``before``, of the tokens after ``heads``; ``new``: it was unseen.

    ``joined``: in one forward with the step before, whose chunk stands right in front of it. ``reason``: why
    no stored KV serves.
    """

    seat: Seat
    before: Seats
    new: bool = False
    heads: tuple[TextHead, ...] = ()
    joined: bool = False
    reason: Reason = ""

    @property
    def head_tokens(self) -> int:
        """Tokens whose KV is at hand."""
        return sum(head.tokens for head in self.heads)

    @property
    def tokens(self) -> int:
        """Tokens that run."""
        return self.seat.length - self.head_tokens


@dataclass(frozen=True)
class Archive:
    """A chunk's canonical is stored before it leaves or moves; ``tokens`` as for `Place`.

    ``later``: after the operation, as later work.
    """

    number: int
    tokens: int = 0
    later: bool = False


@dataclass(frozen=True)
class Harvest:
    """The patch of a chunk's prefill is formed and stored.

    ``base``: the anchor of the canonical it is formed against, "" for the window's own. ``tokens`` as for
    `Place`, ``later`` as for `Archive`.
    """

    number: int
    base: str = ""
    tokens: int = 0
    later: bool = False


@dataclass(frozen=True)
class Follow:
    """In the background a chunk runs behind its predecessor alone, and leaves the patch for that.

    It is what serves where most of its other antecedents have left (`ReusePolicy.max_departed`).
    """

    number: int
    predecessor: int
    tokens: int = 0


@dataclass(frozen=True)
class Clean:
    """A chunk shows its canonical; ``tokens`` as for `Place`."""

    number: int
    tokens: int = 0


Step = Place | Prefill | Archive | Harvest | Follow | Clean


def runs_of(steps: Iterable[Step]) -> list[list[Step]]:
    """The steps in groups: those joined to a forward stand with it, and so do chunks placed between them."""
    groups, at = list[list[Step]](), 0
    for step in steps:
        if not isinstance(step, Prefill):
            groups.append([step])
        elif not step.joined:
            at = len(groups)
            groups.append([step])
        else:
            between = groups[at + 1 :]
            places = [group for group in between if isinstance(group[0], Place)]
            groups[at] += [*(group[0] for group in places), step]
            groups[at + 1 :] = [group for group in between if group not in places]
    return groups


@dataclass(frozen=True)
class Cost:
    """Forwards, tokens run through the decoder, and vision encodes."""

    forwards: int = 0
    tokens: int = 0
    encodes: int = 0


def cost_of(steps: Iterable[Step], encodes: int = 0) -> Cost:
    """What the steps of an operation run before later work, with its vision encodes."""
    run_steps = [step for step in steps if step.tokens]
    joined_count = sum(isinstance(step, Prefill) and step.joined for step in run_steps)
    return Cost(len(run_steps) - joined_count, sum(step.tokens for step in run_steps), encodes)


@dataclass(frozen=True)
class Plan:
    """An operation: the window before and after it, its steps in order, and their cost.

    It holds ids, places and keys of rows: no content and no tensor. `KameraWindow.run` runs it. ``request``
    is what was asked, with names alone, under ``policy``. A chunk of ``after`` without a step stays on the KV
    that it has, perhaps at another place or with another guarantee.

    ``later`` is the cost of what it leaves for background work.

    ``arrived`` is the number of the seat it concerns, ``left`` those of the seats that leave. ``heads`` are,
    by number, how many first tokens of prefilled chunks have their KV at hand.
    """

    request: Request
    policy: ReusePolicy
    operation: str
    before: Seats
    after: Seats
    steps: tuple[Step, ...]
    cost: Cost
    arrived: int | None = None
    left: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    later: Cost = Cost()

    @property
    def heads(self) -> dict[int, int]:
        """See above."""
        return {s.seat.number: s.head_tokens for s in self.steps if isinstance(s, Prefill) and s.heads}

    def comparable_text(self) -> str:
        """All that decides what runs, seats numbered as in `to_json`: equal for plans that do the same."""
        same = replace(self, cost=Cost(), later=Cost(), arrived=None, notes=())
        return json.dumps(_unstructure(same), sort_keys=True)

    def to_json(self) -> str:
        """The plan as JSON. Chunks of the window before it are numbered from 0, new ones behind them."""
        return json.dumps({"format": FORMAT, **_unstructure(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan out of `to_json`. Raises ValueError for anything else."""
        try:
            document = json.loads(text)
            if document.pop("format") != FORMAT:
                raise ValueError("it has another format")
            return converter().structure(document, Plan)
        except (ValueError, TypeError, KeyError, AttributeError, cattrs.BaseValidationError) as error:
            raise ValueError(
                f"{quote(text)} is no plan ({type(error).__name__}): write it with to_json"
            ) from None


FORMAT = 1


def _unstructure(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = converter().unstructure(plan)
    numbers = {seat.number: i for i, seat in enumerate(plan.before.seats)}
    return _renumber(document, numbers)


def _renumber(value: Any, numbers: dict[int, int]) -> Any:
    """The document with seats numbered in the order in which they come; unknown ones get the next number."""
    if isinstance(value, Mapping):
        return {
            key: numbers.setdefault(part, len(numbers))
            if key in ("number", "arrived") and part is not None
            else [numbers.setdefault(n, len(numbers)) for n in part]
            if key == "left"
            else _renumber(part, numbers)
            for key, part in value.items()
        }
    return [_renumber(part, numbers) for part in value] if isinstance(value, list | tuple) else value


@cache
def converter() -> cattrs.Converter:
    """Turns the values of plans into JSON types and back."""
    json_converter = make_converter(forbid_extra_keys=True)
    json_converter.register_unstructure_hook(ReusePolicy, ReusePolicy.to_info)
    json_converter.register_structure_hook(ReusePolicy, lambda info, _: ReusePolicy(**info))

    def name(value: Any, _: object = None) -> int | Newcomer:
        """A slot by its index, or a chunk that comes."""
        return value if isinstance(value, int) else json_converter.structure(value, Newcomer)

    def names(values: Any, _: object = None) -> tuple[int | Newcomer, ...]:
        return tuple(name(value) for value in values)

    def none(_: Any, __: object) -> tuple[()]:
        return ()

    fields: dict[type, tuple[str, Any]] = {
        Append: ("content", name),
        Recall: ("chunk", name),
        Evict: ("slot", name),
        Condition: ("slot", name),
    }
    for kind, (field, hook) in [*fields.items(), (Arrange, ("order", names)), (Arrange, ("among", none))]:
        json_converter.register_structure_hook_func(partial(eq, get_type_hints(kind)[field]), hook)
    configure_tagged_union(Request, json_converter)
    configure_tagged_union(Step, json_converter)
    return json_converter
