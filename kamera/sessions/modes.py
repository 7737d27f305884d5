"""Modes of an edit: the treatment of segments behind it, and the cheapest that a policy admits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from kamera.content import Conversations, Message, Rendered, tool_schema
from kamera.edits import EditPolicy, Mode, apply_policy
from kamera.edits import check_policy as check_edit_policy
from kamera.errors import quote
from kamera.forks import lazy
from kamera.ops import digest
from kamera.trust import Guarantee, OnLeave, ReusePolicy, at_least, weakest
from kamera.window import EngineSlot, EngineWindow, KameraWindow, Slot

SessionMode = Mode
"""The same for all edits of a conversation (docs/sessions.md)."""
Applied = Literal["amortize", "repair", "forget"]
"""A mode without the choice."""

_ON_LEAVE: dict[str, OnLeave] = {"amortize": "keep", "repair": "repair", "forget": "exact"}
_STRICTNESS: tuple[OnLeave, ...] = ("keep", "repair", "exact")


def check_mode(mode: Any) -> None:
    """Raise ValueError for an unknown mode."""
    if mode not in get_args(SessionMode):
        raise ValueError(f"mode {quote(mode)} is none of {', '.join(get_args(SessionMode))}")


@dataclass(frozen=True, eq=False)
class Manner:
    """How a session answers: options of `ChatSession`. Raises ValueError for an unknown mode."""

    tools: Sequence[Any] | None = None
    mode: SessionMode = "auto"
    edit_policy: EditPolicy | None = None
    uncached: bool = False
    reuse: bool = False
    anticipates: bool = True

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_edit_policy(self.edit_policy)
        if isinstance(self.tools, str | Mapping) or callable(self.tools):
            raise ValueError(f"tools {quote(self.tools)} are none: give a list of schemas or functions")

    @lazy
    def kind(self) -> str:
        """The digest of the tools."""
        return tools_digest(self.tools)

    def render(self, conversations: Conversations, history: Sequence[Message]) -> Rendered:
        """The prompt of a history. Raises the errors of `Conversations.render`."""
        return replace(conversations.render(history, tools=self.tools), anchored=not self.reuse)

    def apply_policy(self, history: Sequence[Message], turn: int) -> list[Message]:
        """The history after the edit policy. Raises EditPolicyFailed."""
        return [*(history if self.edit_policy is None else apply_policy(self.edit_policy, history, turn))]


def tools_digest(tools: Sequence[Any] | None) -> str:
    """A digest of tools as the template sees them; the same in every process."""
    schemas = None if tools is None else [tool_schema(tool) for tool in tools]
    return digest("kamera.pool.tools.v1", json.dumps(schemas, default=repr))


def default_policy(mode: SessionMode, reuse: bool = False) -> ReusePolicy:
    """The policy of a session that was given none: exact, unless its ``mode`` or ``reuse`` asks for more.

    What "amortize" keeps remembers all that has left, however much that is. Content that came before is
    served down to survivors; a patch of other antecedents, or none, only where a policy says so.
    """
    if mode == "forget" or (mode == "auto" and not reuse):
        return ReusePolicy.exact()
    departed = 1.0 if mode == "amortize" else ReusePolicy.max_departed
    return ReusePolicy(minimum="survivor" if reuse else ReusePolicy.minimum, max_departed=departed)


def mode_of(on_leave: OnLeave) -> Applied:
    """The mode by the name that sessions give it."""
    return next(mode for mode in get_args(Applied) if _ON_LEAVE[mode] == on_leave)


def laxest_treatment(mode: str, minimum: Guarantee) -> OnLeave:
    """The least strict treatment that ``mode`` may come to under a policy's ``minimum``, at any cost."""
    if minimum == "exact":
        return "exact"
    return _ON_LEAVE[mode] if mode != "auto" else "keep" if at_least("survivor", minimum) else "repair"


OF_THE_PROMPT = frozenset({"exact", "patched", "orbit"})
"""Guarantees of KV that was conditioned on nothing outside of its prompt."""


def first_that_knows_more(slots: Sequence[Slot | EngineSlot]) -> int:
    """Index of the first slot whose KV may be conditioned on content outside of the window."""
    indices = (i for i, slot in enumerate(slots) if slot.guarantee not in OF_THE_PROMPT)
    return next(indices, len(slots))


def worth_to_others(window: KameraWindow | EngineWindow) -> Guarantee:
    """The weakest guarantee of a window as other conversations see it."""
    return weakest({slot.guarantee for slot in window.slots})


def choices(modes: Sequence[str], minimum: Guarantee, keeps_apart: bool = False) -> tuple[OnLeave, ...]:
    """The treatments from which an edit under ``modes`` and a policy's ``minimum`` chooses.

    The strictest of several holds for all, since segments behind one edit are also behind the earlier ones.
    ``keeps_apart``: auto does not choose "exact", which prefills segments joined, so that none of them
    is found again elsewhere.
    """
    if minimum == "exact":
        return ("exact",)
    least = max((_STRICTNESS.index(_ON_LEAVE[mode]) for mode in modes if mode != "auto"), default=0)
    most = _STRICTNESS.index("repair" if keeps_apart else "exact") if "auto" in modes else least
    return _STRICTNESS[least : max(least, most) + 1]
