"""Plans as JSON, and their comparison: seats are numbered by their places, new ones behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from operator import eq
from typing import Any, get_type_hints

import cattrs
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from kamera.errors import quote
from kamera.trust import ReusePolicy
from kamera.window.requests import Append, Arrange, Condition, Evict, Newcomer, Recall, Request
from kamera.window.steps import Cost, Plan, Step

FORMAT = 1


def plan_to_json(plan: Plan) -> str:
    """A plan as JSON."""
    document = _unstructure(plan)
    return json.dumps({"format": FORMAT, **document}, separators=(",", ":"))


def plan_from_json(text: str) -> Plan:
    """A plan out of `plan_to_json`. Raises ValueError for anything else."""
    try:
        document = json.loads(text)
        if document.pop("format") != FORMAT:
            raise ValueError("it has another format")
        return converter().structure(document, Plan)
    except (ValueError, TypeError, KeyError, AttributeError, cattrs.BaseValidationError) as error:
        raise ValueError(
            f"{quote(text)} is no plan ({type(error).__name__}): write it with to_json"
        ) from None


def outline(plan: Plan) -> str:
    """See `Plan.outline`."""
    document = _unstructure(replace(plan, cost=Cost(), later=Cost(), arrived=None, notes=()))
    return json.dumps(document, sort_keys=True)


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
    made = make_converter(forbid_extra_keys=True)
    made.register_unstructure_hook(ReusePolicy, ReusePolicy.to_info)
    made.register_structure_hook(ReusePolicy, lambda info, _: ReusePolicy(**info))

    def name(value: Any, _: object = None) -> int | Newcomer:
        """A slot by its index, or a chunk that comes."""
        return value if isinstance(value, int) else made.structure(value, Newcomer)

    def names(values: Any, _: object = None) -> tuple[int | Newcomer, ...]:
        return tuple(name(value) for value in values)

    def none(_: Any, __: object) -> tuple[()]:
        return ()

    given: dict[type, tuple[str, Any]] = {
        Append: ("content", name),
        Recall: ("chunk", name),
        Evict: ("slot", name),
        Condition: ("slot", name),
    }
    for kind, (field, hook) in [*given.items(), (Arrange, ("order", names)), (Arrange, ("among", none))]:
        made.register_structure_hook_func(partial(eq, get_type_hints(kind)[field]), hook)
    configure_tagged_union(Request, made)
    configure_tagged_union(Step, made)
    return made
