"""Anticipation: after an answer a session prepares its next prompt's window, as background work.

What leaves next is often known: the edit policy says so, or a rule that the client was seen to follow.
Stand-ins of the shape of earlier turns' messages take the place of those that are not known yet: the first
with which anything leaves counts, for a turn with which nothing does finds the window as it stands. All in
front of them is arranged on a fork of the window, under the session's own mode and policy, so that the next
turn finds it in place and runs its new pieces alone. A prompt that comes otherwise starts from the window it
would have started from: segments are compared by their ids, as in every turn.

A ledger bounds all this work: what a prefix cache would have run for the session's turns is what may be run
to prepare others. A client's rule that was wrong twice in a row prepares nothing until it is seen twice more.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kamera import forks
from kamera.content import Message
from kamera.edits import Client, Foreseen, alike, due
from kamera.engines import Engine
from kamera.errors import KameraError
from kamera.patches import Ahead, Ready, background_of
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Manner, anchor_ids, end_of, prefix_tokens, prompt_of_messages
from kamera.sessions.showing import State, choose_treatment
from kamera.window import KameraWindow

logger = logging.getLogger(__name__)

_REMEMBERED_TURNS = 8
"""Turns that a session remembers until the next anticipation."""

_WRONG = 2
"""Wrong guesses in a row after which a client's rule is doubted, and turns that show it to be right again."""

_TURNS = 16
"""Turns whose messages may stand in for the next ones."""


class Habits:
    """What a session's turns have told of its client, and what preparing for it may run yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = forks.Lock()
        # turns that nobody has learned from yet: the history before, and the one that the client gave
        self._turns: deque[tuple[Sequence[Message], Sequence[Message]]] = deque(maxlen=_REMEMBERED_TURNS)
        self._allowed = 0  # tokens that a prefix cache would have run, less those that preparing ran
        self._client = Client()
        self._guess: Foreseen | None = None  # what was prepared by the client's rule
        self._wrong = 0  # such guesses in a row

    def remember(
        self, old_history: Sequence[Message], new_history: Sequence[Message], prefix_misses: int
    ) -> None:
        """Remember a turn: the ``old_history``, the ``new_history`` that the client gave, and its price.

        That are the tokens which a prefix cache would have run for it.
        """
        with self._lock:
            self._turns.append((old_history, new_history))
            self._allowed += prefix_misses

    # background work is one thread: no other learns or guesses meanwhile

    def client(self) -> Client:
        """What is known of the client after the turns that were answered; nothing of one that is doubted."""
        with self._lock:
            turns = [*self._turns]
            self._turns.clear()
        for old_history, new_history in turns:
            self._client = self._client.learn(old_history, new_history)
            self._judge(new_history)
        if self._wrong >= _WRONG and self._client.times >= _WRONG:
            self._wrong = 0
        return self._client if self._wrong < _WRONG else Client()

    def guess(self, next_history: Foreseen) -> None:
        """Note what was prepared, to be judged by the next turn."""
        self._guess = next_history

    def spend(self, tokens: int) -> bool:
        """Whether so many tokens may be run to prepare something; they count as run."""
        with self._lock:
            allowed = tokens <= self._allowed
            self._allowed -= tokens if allowed else 0
        return allowed

    def _judge(self, history: Sequence[Message]) -> None:
        if self._guess is None:
            return
        known = self._guess.messages[: self._guess.known - 1]  # but for the answer, which may differ
        self._wrong = 0 if alike([*history[: len(known)]], known) else self._wrong + 1
        self._client = self._client.doubted() if self._wrong == _WRONG else self._client
        self._guess = None


class Anticipation:
    """What a session has prepared for its next prompt, and what it knows of its client. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.habits = Habits()
        self._queue = background_of(engine)
        self._preparation: Ahead[State] = Ahead(engine)
        self._lock = forks.Lock()
        self._begun: tuple[weakref.ref[State], Manner] | None = None

    def begin(self, state: State, anchors: Anchors, manner: Manner) -> None:
        """Prepare for what follows on ``state``, in the background; what was for another is dropped."""
        # a session that is gone needs nothing prepared, and its window is not held for that
        habits, state_reference = self.habits, weakref.ref(state)
        with self._lock:
            if self._begun is not None and self._begun[0]() is state and self._begun[1] is manner:
                return
            self._begun = state_reference, manner

        def make() -> Ready[State] | None:
            live_state = state_reference()
            if live_state is None:
                return None
            client = habits.client()
            try:
                for next_history in foresee_histories(live_state, client, manner, anchors):
                    ready = prepare_window(live_state, next_history, anchors, manner, habits)
                    if ready is not None:
                        if manner.edit_policy is None and not live_state.decays:
                            habits.guess(next_history)
                        return Ready(ready, anchors.memory(ready.window).own)
            except (KameraError, ValueError) as error:
                logger.info("a session's next prompt was not prepared: %s", error)
            return None

        anchors.store.awaited[id(self._queue)] = self._queue.flush  # no work meets a closed store
        self._preparation.begin(make)

    def take_prepared(self) -> State | None:
        """What was prepared, for the next prompt alone; None if nothing was, or not yet. Work on it ends."""
        with self._lock:
            self._begun = None
        return self._preparation.take()


def foresee_histories(state: State, client: Client, manner: Manner, anchors: Anchors) -> Iterator[Foreseen]:
    """Next histories after an answer, the likeliest first. Raises as `Manner.shape`."""
    history = state.messages
    if not history or history[-1].get("role") != "assistant":
        return
    if manner.edit_policy is not None or state.decays:
        left = due(state.decays, state.turn, time.time())
        for stand_ins in _stand_ins(history):
            coming = [*history, *stand_ins]
            messages = [dict(m) for m in manner.shape(anchors.conversations, coming, state.turn, left)[0]]
            tail = [message.get("role") for message in messages[-len(stand_ins) :]]
            if tail == [message.get("role") for message in stand_ins]:
                yield Foreseen(messages, len(messages) - len(stand_ins))
        return
    for stand_ins in _stand_ins([*client.unedited, history[-1]]) if client.rule else ():
        next_history = client.next(history[-1], stand_ins)
        if next_history is not None:
            yield next_history


def prepare_window(
    state: State, next_history: Foreseen, anchors: Anchors, manner: Manner, habits: Habits
) -> State | None:
    """The state from which the next turn starts, its known part in place; None if nothing leaves or moves.

    Nor is anything prepared that runs more tokens than ``habits`` allow. ``state`` is unchanged. Raises the
    errors of `Conversations.render` and of the window.
    """
    layout = state.layout
    if not isinstance(state.window, KameraWindow) or layout is None:
        return None
    messages = next_history.messages
    prompt = prompt_of_messages(manner.render(anchors.conversations, messages), next_history.known)
    if anchor_ids(layout.prompt) != anchor_ids(prompt) or prefix_tokens(layout, prompt) == end_of(layout):
        return None
    window = anchors.fork(state.window, apart=True)
    prompt = prompt.cut_as(layout.prompt)
    choice, _ = choose_treatment(anchors, window, layout, prompt, [manner.mode], manner.reuse)
    if not habits.spend(choice.plan.cost.tokens):
        return None
    window.run(choice.plan)
    return replace(state, layout=choice.order.layout, window=window)


def _stand_ins(history: Sequence[Message]) -> list[list[Message]]:
    """The messages between answers, of the last turns, one of each shape: the most frequent shape first."""
    ends = [i for i, message in enumerate(history) if message.get("role") == "assistant"]
    starts = [0, *(end + 1 for end in ends[:-1])]
    turns = [
        [m for m in history[start:end] if m.get("role") not in ("system", "developer")]
        for start, end in zip(starts, ends, strict=True)
    ]
    turns = [turn for turn in (turns[1:] or turns)[: -_TURNS - 1 : -1] if turn]
    shapes = [[_shape(message) for message in turn] for turn in turns]
    firsts = [i for i, shape in enumerate(shapes) if shapes.index(shape) == i]
    return [turns[i] for i in sorted(firsts, key=lambda i: -shapes.count(shapes[i]))]


def _shape(message: Message) -> tuple[Any, ...]:
    """The role of a message and the kinds of its items."""
    content = message.get("content")
    items = content if isinstance(content, list | tuple) else ["text"]
    return message.get("role"), *(i.get("type") if isinstance(i, dict) else str(i) for i in items)
