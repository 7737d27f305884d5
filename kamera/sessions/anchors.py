"""What sessions share: windows with only a system prompt, prefilled once, pictures, and histories by turn."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from kamera import forks
from kamera.content import Conversations, Message, check_messages, copy_message
from kamera.edits import same
from kamera.engines import Engine, Spent
from kamera.errors import ProcessorRequired, UnknownTurn, quote
from kamera.ops import tensor_digest
from kamera.sessions.grammar import call_form
from kamera.sessions.layout import KEPT, SessionWindow, Stretch, Trail
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy, check_policy
from kamera.window import EngineWindow, KameraWindow, Listener, WindowMemory

OneWindow = TypeVar("OneWindow", KameraWindow, EngineWindow, SessionWindow)

SYSTEM_PROMPTS = 16
"""Number of system prompts per tenant that are kept prefilled for new sessions."""


def conversations_of(backbone: Engine, kind: type[Conversations] = Conversations) -> Conversations:
    """The renderer of a backbone. Raises ProcessorRequired if it has no chat template."""
    if backbone.processor is None:
        raise ProcessorRequired(
            "a conversation needs the model's chat template: give the backbone its processor "
            "(Backbone(model, processor))"
        )
    limits = backbone.builder.limits
    return kind(backbone.processor, most=backbone.limits.trained, limits=limits)


def check_count(name: str, value: Any, least: int) -> None:
    """Raise ValueError for a value that is no whole number from ``least`` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={quote(value)}: give a whole number from {least} on")


class Anchors:
    """Opens and forks the windows of sessions that share a backbone, a store and a policy.

    The last ``prompt_limit`` system prompts are kept. ``conversations`` render them, and ``branches`` are the
    turns that they may go on from; by default those of these sessions alone. ``trail`` has what their prompts
    may begin with, ``trail_bytes`` of it edited away. ``listener`` hears all windows. Threads may share one.
    Raises ProcessorRequired for a backbone without a chat template.
    """

    def __init__(
        self,
        backbone: Engine,
        store: ChunkStore,
        *,
        max_tokens: int | None = None,
        policy: ReusePolicy | None = None,
        conversations: Conversations | None = None,
        branches: Branches | None = None,
        prompt_limit: int = 1,
        listener: Listener | None = None,
        trail_bytes: int = KEPT,
    ) -> None:
        check_policy(policy)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens, 1)
        self.backbone = backbone
        self.store = store
        self.conversations = conversations or conversations_of(backbone)
        self.branches = branches or Branches()
        self.trail = Trail(trail_bytes)
        self.calls = call_form(backbone)
        self.prefill_count = 0
        self.max_tokens = max_tokens
        self.policy = policy
        self._prompt_limit = prompt_limit
        self._listener = listener
        self._lock = forks.Lock()
        self._windows: OrderedDict[str, KameraWindow] = OrderedDict()
        self._prefilling: dict[str, forks.Lock] = {}

    def open(self, ids: torch.Tensor) -> tuple[SessionWindow, Spent]:
        """A window without chunks whose anchor is ``ids`` ``[tokens]``, and the work of prefilling them.

        That is none if they were at hand.
        """
        name, opening = tensor_digest(ids), Spent()
        with self._lock:
            prefilling = self._prefilling.setdefault(name, forks.Lock())
        with prefilling:  # who waits wants the same system prompt
            window = self._windows.get(name)
            if window is None:
                start_time = time.perf_counter()
                with self.backbone.measure() as work:  # none where the store has the prompt
                    window = KameraWindow(
                        self.backbone, self.store, ids, max_tokens=self.max_tokens, policy=self.policy
                    )
                    self.listen_to(window)
                seconds = time.perf_counter() - start_time
                opening = Spent(work.forwards, work.tokens, work.vision_encodes, seconds)
            with self._lock:
                self._prefilling.pop(name, None)
                self.prefill_count += opening.forwards
                self._windows[name] = window
                self._windows.move_to_end(name)
                while len(self._windows) > self._prompt_limit:
                    self._windows.popitem(last=False)
                return window.fork(), opening

    def listen_to(self, window: KameraWindow) -> None:
        """Listen to a window, and to its forks."""
        if self._listener is not None:
            window.on_event(self._listener)

    # a window's forks share state, so only one thread at a time may create or measure them

    def fork(self, window: OneWindow, *, apart: bool = False) -> OneWindow:
        """A fork of a window; ``apart`` as in `KameraWindow.fork`."""
        with self._lock:
            return window.fork(apart=apart)

    def leave(self, stretch: Stretch) -> None:
        """Keep a stretch that its session has left, for a client that takes its edit back."""
        if isinstance(stretch.window, KameraWindow):
            window = self.fork(stretch.window, apart=True)
            self.trail.keep(replace(stretch, window=window), self.memory(window).own)

    def memory(self, window: SessionWindow | None) -> WindowMemory:
        """The bytes of a window; none without one, or of one over an engine, which has the KV."""
        with self._lock:
            return window.memory() if isinstance(window, KameraWindow) else WindowMemory(0, 0, 0, 0)


# -- histories by turn -----------------------------------------------------------------------------


History = tuple[dict[str, Any], ...]
"""Messages of a conversation, in order."""

MOST = 1 << 28
"""Bytes of the messages of turns that are kept, pictures among them."""


@dataclass(frozen=True)
class PastTurn:
    """What was asked behind the turn ``previous_id``, and the answer, its last message.

    ``system`` are the conversation's system messages then. One that ``has_left`` keeps its place, without
    messages.
    """

    previous_id: str | None
    system: History
    messages: History
    has_left: bool = False


Turns = Mapping[str, PastTurn]
"""Turns by their ids, with all those that they go on from."""


class Branches:
    """The last used turns of one tenant, up to ``most`` bytes of their messages. Thread-safe.

    Each of ``archives`` finds a turn that is not among them, where it was saved; {} if it was not.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._size = most, 0
        self._turns: OrderedDict[str, PastTurn] = OrderedDict()
        self._lock = forks.Lock()
        self.archives: list[Callable[[str], Turns]] = []

    def keep(self, name: str, last: str | None, before: History, history: History) -> None:
        """Keep the turn ``name``; behind the turn ``last`` if its ``history`` goes on from that, ``before``.

        A turn that was asked again, and answered the same, goes on from none.
        """
        first, base = first_non_system(history), before[first_non_system(before) :]
        with self._lock:
            if last is None or not self._is_whole(last) or not same(history[first:-1][: len(base)], base):
                last, base = None, ()
            self._put(name, PastTurn(last, history[:first], history[first + len(base) :]))
            self._trim()

    def turns(self, names: Iterable[str]) -> Turns:
        """Those of these turns that are kept, with all that they go on from."""
        with self._lock:
            whole, found = [name for name in names if self._is_whole(name)], dict[str, PastTurn]()
            for name in whole:
                at: str | None = name
                while at is not None and at not in found:
                    found[at] = self._turns[at]
                    at = found[at].previous_id
            return found

    def restore(self, turns: Turns) -> None:
        """Keep turns that were saved; what is known of them here holds."""
        with self._lock:
            for name, turn in turns.items():
                if name not in self._turns or turn.has_left:
                    self._put(name, turn)
            self._trim()

    def history(self, name: str) -> History:
        """The messages up to a turn. Raises UnknownTurn for one that left, or is not kept."""
        self._look_up(name)
        with self._lock:
            turn = self._turns.get(name)
            if turn is None or turn.has_left or not self._is_whole(name):
                raise UnknownTurn(
                    f"no turn {quote(name)} here: it was deleted, or is not kept; send the whole history"
                )
            return self._join(name)

    def history_or_none(self, name: str | None) -> History | None:
        """The messages up to a turn, also of one that left itself; None if that is not known."""
        with self._lock:
            return self._join(name) if name is not None and self._is_whole(name) else None

    def retell(self, name: str, answer: Message) -> None:
        """Let a turn end with ``answer``, as its client knows it: with its calls apart, say."""
        with self._lock:
            turn = self._turns.get(name)
            if turn is not None and not turn.has_left:
                self._put(name, replace(turn, messages=(*turn.messages[:-1], dict(answer))))

    def remove_turn(self, name: str) -> None:
        """Take a turn out of all histories; turns behind it stay. Raises UnknownTurn for one never kept."""
        self._look_up(name)
        with self._lock:
            turn = self._turns.get(name)
            if turn is None:
                raise UnknownTurn(f"no turn {quote(name)} here: it is not kept, or never was")
            self._put(name, PastTurn(turn.previous_id, turn.system, (), has_left=True))

    def goes_through(self, last: str | None, name: str) -> bool:
        """True if the turn ``last`` is ``name``, or one behind it."""
        with self._lock:
            while last is not None and last != name:
                turn = self._turns.get(last)
                last = None if turn is None else turn.previous_id
            return last is not None

    # -- inside --------------------------------------------------------------------------------

    def _look_up(self, name: str) -> None:
        """Bring a turn back that is kept no more."""
        with self._lock:
            if self._is_whole(name):
                return
        for archive in self.archives:
            if turns := archive(name):
                self.restore(turns)
                return

    def _trim(self) -> None:
        while self._size > self._most and len(self._turns) > 1:
            self._size -= _weight(self._turns.popitem(last=False)[1].messages)

    def _put(self, name: str, turn: PastTurn) -> None:
        old = self._turns.get(name)
        self._size += _weight(turn.messages) - (0 if old is None else _weight(old.messages))
        self._turns[name] = turn
        self._is_whole(name)

    def _is_whole(self, name: str) -> bool:
        """True if no turn up to this one was let go; each of them counts as used."""
        at: str | None = name
        while at is not None and at in self._turns:
            self._turns.move_to_end(at)
            at = self._turns[at].previous_id
        return at is None

    def _join(self, name: str) -> History:
        parts, at = list[History](), self._turns[name]
        while True:
            parts.append(at.messages)
            if at.previous_id is None:
                break
            at = self._turns[at.previous_id]
        return (*self._turns[name].system, *(message for part in reversed(parts) for message in part))


def whole_history(
    old_history: History,
    messages: str | Message | Sequence[Message] | None,
    append: bool = False,
    *,
    branches: bool = False,
) -> History:
    """The ``old_history`` with new messages behind it, or the whole one given; as `ChatSession.send` says.

    One that ``branches`` has a system message that new ones begin with in place of its own. Raises ValueError
    for what is no message.
    """
    if messages is None:
        return old_history
    if isinstance(messages, str):
        return (*old_history, {"role": "user", "content": messages})
    if isinstance(messages, Mapping):
        check_messages([messages])
        return (*old_history, copy_message(messages))
    check_messages(messages)
    new_messages = tuple(copy_message(message) for message in messages)
    if branches and new_messages and new_messages[0]["role"] == "system":
        system_count = int(bool(old_history) and old_history[0]["role"] == "system")
        return (new_messages[0], *old_history[system_count:], *new_messages[1:])
    return (*old_history, *new_messages) if append or branches else new_messages


def first_non_system(messages: Sequence[Message]) -> int:
    """Index of the first message that is no system message."""
    indices = (i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer"))
    return next(indices, len(messages))


def _weight(value: Any) -> int:
    """Bytes of a message or a part of it, about."""
    if isinstance(value, Mapping):
        return sum([_weight(inner) for inner in value.values()])
    if isinstance(value, list | tuple):
        return sum([_weight(inner) for inner in value])
    if hasattr(value, "getbands"):  # a picture
        return int(value.width * value.height * len(value.getbands()))
    if hasattr(value, "frames"):  # a clip
        return _weight(value.frames)
    return int(getattr(value, "nbytes", len(value) if isinstance(value, str | bytes) else 64))
