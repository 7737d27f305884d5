"""Modes of an edit: the treatment of segments behind it, and the cheapest that a policy admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, get_args

from kamera.errors import PolicyRefused, quote
from kamera.patches import GUARANTEES, at_least, weakest
from kamera.window import Guarantee, KameraWindow, OnLeave

SessionMode = Literal["amortize", "repair", "forget", "auto"]
Applied = Literal["amortize", "repair", "forget"]
"""A mode without the choice."""

_ON_LEAVE: dict[str, OnLeave] = {"amortize": "keep", "repair": "repair", "forget": "exact"}
_STRICTNESS: tuple[OnLeave, ...] = ("keep", "repair", "exact")
_TIES: tuple[OnLeave, ...] = ("repair", "keep", "exact")
_APPLIED: dict[OnLeave, Applied] = {"keep": "amortize", "repair": "repair", "exact": "forget"}

Order = TypeVar("Order")


def check_mode(mode: str) -> None:
    """Raise `ValueError` for an unknown mode."""
    if mode not in get_args(SessionMode):
        raise ValueError(f"mode {quote(mode)} is none of {', '.join(get_args(SessionMode))}")


def applied(on_leave: OnLeave) -> Applied:
    """The mode by the name that sessions give it."""
    return _APPLIED[on_leave]


def laxest(mode: str, minimum: Guarantee) -> OnLeave:
    """The least strict treatment that ``mode`` may come to under a policy's ``minimum``, at any cost."""
    if minimum == "exact":
        return "exact"
    if mode == "auto":
        return "keep" if at_least("survivor", minimum) else "repair"
    return _ON_LEAVE[mode]


def choices(modes: Sequence[str], window: KameraWindow, apart: bool = False) -> tuple[OnLeave, ...]:
    """The treatments from which an edit under ``modes`` chooses; one where no mode is auto.

    The strictest of several holds for all, since segments behind one edit are also behind the earlier ones.
    ``apart``: auto does not choose "exact", which prefills segments joined, so that none of them is found
    again elsewhere.
    """
    if window.policy.minimum == "exact":
        return ("exact",)
    named = [_ON_LEAVE[mode] for mode in modes if mode != "auto"]
    floor = max(named, key=_STRICTNESS.index, default="keep")
    least = _STRICTNESS.index(floor)
    most = least
    if "auto" in modes:
        most = max(least, _STRICTNESS.index("repair" if apart else "exact"))
    return _STRICTNESS[least : most + 1]


def cheapest(
    window: KameraWindow, among: Sequence[OnLeave], order_of: Callable[[OnLeave], Order]
) -> tuple[OnLeave, Order]:
    """The treatment with the fewest tokens to run, of those whose KV the policy's minimum admits.

    ``order_of`` gives what `KameraWindow.arrange` shall hold under a treatment. Costs and guarantees are
    those of the window's plans, which run nothing. Equal costs go to the better guarantee, then to "repair",
    whose chunks are finer than those of "exact". Raises PolicyRefused if no treatment can be carried out.
    """
    orders = {on_leave: order_of(on_leave) for on_leave in among}
    found: list[tuple[tuple[int, int, int], OnLeave]] = []
    refusal: PolicyRefused | None = None
    for on_leave in among if len(among) > 1 else ():
        try:
            plan = window.plan_arrange(orders[on_leave], on_leave=on_leave)  # type: ignore[arg-type]
        except PolicyRefused as error:
            refusal = error
            continue
        worth = weakest(plan.after.worths)
        if on_leave == "exact" or at_least(worth, window.policy.minimum):
            cost = (plan.cost.tokens, GUARANTEES.index(worth), _TIES.index(on_leave))
            found.append((cost, on_leave))
    if not found and refusal is not None:
        raise refusal
    best = min(found)[1] if found else among[0]
    return best, orders[best]
