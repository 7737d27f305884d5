"""Anticipation: after an answer a session prepares its next prompt's window, as later work.

What leaves next is often known: the edit policy says so, or a rule that the client was seen to follow.
Stand-ins of the shape of earlier turns' messages take the place of those that are not known yet: the first
with which anything leaves counts, for a turn with which nothing does finds the window as it stands. All in
front of them is arranged on a fork of the window, under the session's own mode and policy, so that the next
turn finds it in place and runs its new pieces alone. A prompt that comes otherwise starts from the window it
would have started from: segments are compared by their ids, as in every turn.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kamera import forks
from kamera.content import Message
from kamera.edits import Client, EditPolicy, Foreseen, apply_policy
from kamera.engines import Engine
from kamera.errors import KameraError
from kamera.patches import Ahead, Ready, later_of
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import anchor_ids, end_of, prefix_tokens, prompt_of_messages
from kamera.sessions.modes import Manner
from kamera.sessions.showing import State, choose_treatment
from kamera.window import KameraWindow

logger = logging.getLogger(__name__)

_REMEMBERED_TURNS = 8
"""Turns that a session remembers until the next anticipation."""

_TURNS = 16
"""Turns whose messages may stand in for the next ones."""


class Anticipation:
    """What a session has prepared for its next prompt, and what it knows of its client. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._queue = later_of(engine)
        self._preparation: Ahead[State] = Ahead(engine)
        self._lock = forks.Lock()
        # turns that nobody has learned from yet: the history before, and the one that the client gave
        self._turns: deque[tuple[Sequence[Message], Sequence[Message]]] = deque(maxlen=_REMEMBERED_TURNS)
        self._client = Client()

    def remember(self, old_history: Sequence[Message], new_history: Sequence[Message]) -> None:
        """Remember a turn: the ``old_history``, and the ``new_history`` that the client gave."""
        with self._lock:
            self._turns.append((old_history, new_history))

    def begin(self, state: State, anchors: Anchors, manner: Manner) -> None:
        """Prepare for what follows on ``state``, as later work; what was prepared before is dropped."""
        # a session that is gone needs nothing prepared, and its window is not held for that
        own_reference, state_reference = weakref.ref(self), weakref.ref(state)

        def make() -> Ready[State] | None:
            live_state, anticipation = state_reference(), own_reference()
            if live_state is None or anticipation is None:
                return None
            client = anticipation._learn()
            del anticipation
            try:
                for next_history in foresee_histories(live_state, client, manner.edit_policy):
                    ready = prepare_window(live_state, next_history, anchors, manner)
                    if ready is not None:
                        return Ready(ready, anchors.memory(ready.window).own)
            except (KameraError, ValueError) as error:
                logger.info("a session's next prompt was not prepared: %s", error)
            return None

        anchors.store.awaited[id(self._queue)] = self._queue.flush  # no work meets a closed store
        self._preparation.begin(make)

    def take_prepared(self) -> State | None:
        """What was prepared, for the next prompt alone; None if nothing was, or not yet. Work on it ends."""
        return self._preparation.take()

    def _learn(self) -> Client:
        """What is known of the client after the turns that were answered."""
        with self._lock:
            turns = [*self._turns]
            self._turns.clear()
        for old_history, new_history in turns:  # later work is one thread: no other learns meanwhile
            self._client = self._client.learn(old_history, new_history)
        return self._client


def foresee_histories(state: State, client: Client, policy: EditPolicy | None) -> Iterator[Foreseen]:
    """Next histories after an answer, the likeliest first. Raises EditPolicyFailed."""
    history = state.messages
    if not history or history[-1].get("role") != "assistant":
        return
    if policy is not None:
        for stand_ins in _stand_ins(history):
            messages = apply_policy(policy, [*history, *stand_ins], state.turn)
            tail = [message.get("role") for message in messages[-len(stand_ins) :]]
            if tail == [message.get("role") for message in stand_ins]:
                yield Foreseen(messages, len(messages) - len(stand_ins))
        return
    for stand_ins in _stand_ins([*client.unedited, history[-1]]) if client.rule else ():
        next_history = client.next(history[-1], stand_ins)
        if next_history is not None:
            yield next_history


def prepare_window(state: State, next_history: Foreseen, anchors: Anchors, manner: Manner) -> State | None:
    """The state from which the next turn starts, its known part in place; None if nothing leaves or moves.

    ``state`` is unchanged. Raises the errors of `Conversations.render` and of the window.
    """
    layout = state.layout
    if not isinstance(state.window, KameraWindow) or layout is None:
        return None
    messages = next_history.messages
    prompt = prompt_of_messages(
        anchors.conversations.render(messages, tools=manner.tools), next_history.known
    )
    if anchor_ids(layout.prompt) != anchor_ids(prompt) or prefix_tokens(layout, prompt) == end_of(layout):
        return None
    window = anchors.fork(state.window, apart=True)
    prompt = prompt.cut_as(layout.prompt)
    choice, _ = choose_treatment(anchors, window, layout, prompt, [manner.mode], manner.reuse)
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
