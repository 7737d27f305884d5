"""`ChatSession`: a conversation in front of a window. Every change of its history is a cache edit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from kamera.content import Chunk, Conversations, Message, Rendered, media_items
from kamera.edits import Directive, EditPolicy, Snap, difference, edited, edited_messages
from kamera.engines.hf import Backbone
from kamera.errors import ProcessorRequired
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Layout, Run, anchor_ids, anchor_segments, laid_out, question
from kamera.sessions.tool_calls import tool_calls
from kamera.sessions.turn import Turn, TurnReport, turn_report
from kamera.sessions.uncached import UNCACHEABLE, plain_answer, plain_logits
from kamera.store import ChunkStore
from kamera.window import KameraWindow, OnLeave, ReusePolicy, Slot

SessionMode = Literal["amortize", "repair", "forget", "auto"]
_ON_LEAVE: dict[str, OnLeave] = {"amortize": "keep", "repair": "repair", "forget": "exact"}
_STRICTNESS: tuple[OnLeave, ...] = ("keep", "repair", "exact")


@dataclass(frozen=True, eq=False)
class State:
    """All that a turn changes. ``ids`` are the last prompt's tokens, ``layout`` what the window holds."""

    messages: tuple[dict[str, Any], ...] = ()
    turn: int = 0
    ids: torch.Tensor | None = None
    layout: Layout | None = None
    window: KameraWindow | None = None


class ChatSession:
    """A conversation whose history may be edited between turns, by its owner or by an ``edit_policy``.

    The leading system messages (and what the template adds in front) are the window's anchor; every other
    segment of the rendered conversation is a chunk. A turn compares its prompt with the one before:
    segments that are still there are kept or turned, what is new is prefilled. ``mode`` says what becomes
    of segments behind an edit: ``"amortize"`` keeps what they absorbed from what has gone, ``"repair"``
    patches them to what stands there now, ``"forget"`` prefills them (equal to a run that never saw it),
    ``"auto"`` takes the cheapest that the reuse policy admits.

    ``uncached=True`` lets the plain model answer a prompt that no window can hold (it cannot be cut, its
    text spells a special token, it is longer than ``max_tokens``, …): `TurnReport.uncached` says why. The
    default raises what was refused, as a turn that prefills everything is a cost that a caller should ask
    for.

    A turn works on a branch of the window and takes its place when the answer is whole: after an error, or
    a streamer that raises, the session is as it was. It is used from one thread at a time; `fork` may be
    called meanwhile. Raises ProcessorRequired for a backbone without a processor or chat template.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: ChunkStore,
        *,
        tools: Sequence[Any] | None = None,
        mode: SessionMode = "auto",
        policy: ReusePolicy | None = None,
        edit_policy: EditPolicy | None = None,
        max_tokens: int | None = None,
        uncached: bool = False,
    ) -> None:
        conversations = conversations_of(backbone)
        anchors = Anchors(backbone, store, max_tokens=max_tokens, policy=policy)
        self._set_up(anchors, conversations, tools, mode, edit_policy, uncached)

    @classmethod
    def among(
        cls,
        anchors: Anchors,
        conversations: Conversations,
        *,
        tools: Sequence[Any] | None = None,
        mode: SessionMode = "auto",
        edit_policy: EditPolicy | None = None,
        uncached: bool = False,
    ) -> ChatSession:
        """One of several sessions that share their system prompts and what their pictures became."""
        session = cls.__new__(cls)
        session._set_up(anchors, conversations, tools, mode, edit_policy, uncached)
        return session

    def _set_up(
        self,
        anchors: Anchors,
        conversations: Conversations,
        tools: Sequence[Any] | None,
        mode: SessionMode,
        edit_policy: EditPolicy | None,
        uncached: bool,
    ) -> None:
        check_mode(mode)
        self.backbone = anchors.backbone
        self.store = anchors.store
        self.tools = tools
        self.mode: SessionMode = mode
        self.uncached = uncached
        self._anchors = anchors
        self._conversations = conversations
        self._edit_policy = edit_policy
        self._state = State()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history, answers included, before any edit policy."""
        return [dict(message) for message in self._state.messages]

    @property
    def prompt_ids(self) -> torch.Tensor:
        """Tokens of the last prompt, int64 ``[tokens]``: those of the chat template over the conversation."""
        ids = self._state.ids
        return torch.empty(0, dtype=torch.int64) if ids is None else ids

    @property
    def window(self) -> KameraWindow | None:
        """The window that holds the last prompt that one could hold; None before the first."""
        return self._state.window

    @property
    def layout(self) -> Layout | None:
        """The prompt that the window holds, and which segments of it each slot is; None before the first."""
        return self._state.layout

    def rendered(self) -> Rendered:
        """The history as the chat template has it, cut into segments: what directives count in."""
        return self._conversations.render(self._state.messages, tools=self.tools)

    def send(
        self, messages: str | Message | Sequence[Message], *, append: bool = False, **options: Any
    ) -> Turn:
        """Answer the conversation; the answer joins the history.

        ``messages`` is the whole history as the client has it now, edited or not. Text and a single message
        are what is new; with ``append`` a list is, too. ``options`` (max_new_tokens, do_sample, stop_strings,
        streamer, …) go to ``generate`` of transformers. Raises EditPolicyFailed, `ValueError` for more than
        one sequence, and what `Conversations.render` and the window raise.
        """
        if int(options.get("num_return_sequences") or 1) > 1:
            raise ValueError(f"num_return_sequences={options['num_return_sequences']}: a turn has one answer")
        if "stop_strings" in options:
            options.setdefault("tokenizer", getattr(self.backbone.processor, "tokenizer", None))
        history = self._history(messages, append)
        shaped = self._shaped(history)
        try:
            state, report = self._shown(shaped, [self.mode])
        except UNCACHEABLE as error:
            if not self.uncached:
                raise
            inputs = self._conversations.whole(shaped, tools=self.tools)
            text, report = plain_answer(self.backbone, inputs, error, **options)
            state = replace(self._state, ids=inputs["input_ids"][0].cpu())
        else:
            text = _asked(state).generate(_question(state), **options)
        said = {"role": "assistant", "content": text}
        self._state = replace(state, messages=(*history, said), turn=state.turn + 1)
        return Turn(text, tool_calls(text), report)

    def next_token_logits(
        self, messages: str | Message | Sequence[Message] | None = None, *, append: bool = False
    ) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the first token of an answer; nothing joins the history.

        ``messages`` as for `send`; None asks behind the history as it is.
        """
        shaped = self._shaped(self._history(messages, append))
        try:
            state, _ = self._shown(shaped, [self.mode])
        except UNCACHEABLE:
            if not self.uncached:
                raise
            return plain_logits(self.backbone, self._conversations.whole(shaped, tools=self.tools))
        logits = _asked(state).next_token_logits(_question(state))
        self._state = state
        return logits

    def edit(self, directives: Sequence[Directive], *, snap: Snap = "refuse") -> TurnReport:
        """Carry out directives on the history, and on the window behind it.

        They count in `rendered`, as it is before any of them; `edited_messages` says which there are. Of
        several modes the strictest holds for all: what stands behind one edit stands behind those in front.
        Raises InvalidDirective, and what `send` raises for a prompt that no window can hold.
        """
        history = edited_messages(
            self._conversations, self._state.messages, directives, tools=self.tools, snap=snap
        )
        state, report = self._shown(self._shaped(history), [d.mode for d in directives])
        self._state = replace(state, messages=tuple(history))
        return report

    def fork(self) -> ChatSession:
        """A session of the same history, which goes its own way: nothing is copied.

        Of a session that is answering meanwhile, the history before.
        """
        return copy.copy(self)  # no turn writes in a window that a session shows

    def save(self, path: str | Path) -> None:
        """Write the session to a directory of its own: history, pictures (as PNG), the window bit for bit.

        In place of the session saved there, in one step. An ``edit_policy`` is code and is not saved. Raises
        StoreError when the operating system refuses or the directory holds something else, `ValueError` for
        a message that JSON cannot hold, UnreadableMedia for a picture that is gone.
        """
        from kamera.sessions.persist import save_session

        save_session(Path(path), self, self._anchors, self._state)

    @classmethod
    def load(
        cls,
        path: str | Path,
        backbone: Backbone,
        store: ChunkStore,
        *,
        edit_policy: EditPolicy | None = None,
    ) -> ChatSession:
        """A saved session, to go on where it was: what stands in its window is not prefilled again.

        Raises StoreError where there is none, CorruptChunk for a damaged one, StoreVersionError for one of
        another format, IncompatibleChunk for another model or tenant.
        """
        from kamera.sessions.persist import load_session

        settings, state, policy, max_tokens = load_session(Path(path), backbone, store)
        anchors = Anchors(backbone, store, max_tokens=max_tokens, policy=policy)
        session = cls.among(anchors, conversations_of(backbone), edit_policy=edit_policy, **settings)
        session._state = state
        return session

    # -- inside --------------------------------------------------------------------------------

    def _history(
        self, messages: str | Message | Sequence[Message] | None, append: bool
    ) -> tuple[dict[str, Any], ...]:
        before = self._state.messages
        if messages is None:
            return before
        if isinstance(messages, str):
            return (*before, {"role": "user", "content": messages})
        if isinstance(messages, Mapping):
            return (*before, dict(messages))
        given = tuple(dict(message) for message in messages)
        return (*before, *given) if append else given

    def _shaped(self, history: Sequence[Message]) -> list[Message]:
        """The history as the edit policy wants it."""
        if self._edit_policy is None:
            return list(history)
        return [*edited(self._edit_policy, history, self._state.turn)]

    def _shown(self, shaped: Sequence[Message], modes: Sequence[str]) -> tuple[State, TurnReport]:
        """The state with a window that holds the prompt of ``shaped``; the present one is untouched.

        What stands behind a change is brought by the strictest of ``modes``.
        """
        old, prompt = self._state, self._conversations.render(shaped, tools=self.tools)
        before = old.layout
        if old.window is None or before is None or anchor_ids(before.prompt) != anchor_ids(prompt):
            before, first = None, anchor_segments(prompt)
            stop = prompt.segments[first - 1].stop if first else 0
            window, anchor = self._anchors.open(prompt.ids[:stop]), 0
        else:
            window = self._anchors.fork(old.window)
            anchor = window.anchor.length
        slots, on_leave = window.slots, on_leave_of(modes, window)
        pieces = laid_out(prompt, before, join=on_leave == "exact")
        media = {m.digest: m.inputs for m in map(self._conversations.media, media_items(shaped))}
        order: list[Slot | Chunk] = [
            self._chunk(prompt, run, media) if slot is None else slots[slot] for run, slot in pieces
        ]
        report = window.arrange(order, on_leave=on_leave)
        layout = Layout(prompt, tuple(run for run, _ in pieces))
        left = 0 if before is None else _left(before, prompt)
        total = turn_report(slots, report, anchor, prompt.num_tokens, left, window.guarantee)
        return replace(old, ids=prompt.ids, layout=layout, window=window), total

    def _chunk(self, prompt: Rendered, run: Run, media: Mapping[str, Mapping[str, torch.Tensor]]) -> Chunk:
        first, last = prompt.segments[run[0]], prompt.segments[run[1] - 1]
        inputs = {} if first.media is None else dict(media[first.media])
        accepted = set(self.backbone.builder.accepted)
        given = {name: value for name, value in inputs.items() if name in accepted}
        ids = prompt.ids[first.start : last.stop]
        return self.backbone.chunk_from_tensors(ids, label=first.role, **given)


def on_leave_of(modes: Sequence[str], window: KameraWindow) -> OnLeave:
    """The strictest of ``modes``; a window that serves exact KV only has no other."""
    minimum = window.policy.minimum
    auto: OnLeave = "repair" if minimum in ("patched", "orbit") else "keep"
    if minimum == "exact":
        return "exact"
    return max((_ON_LEAVE.get(mode, auto) for mode in modes), key=_STRICTNESS.index, default="keep")


def conversations_of(backbone: Backbone) -> Conversations:
    """What renders for a backbone. Raises ProcessorRequired where it cannot."""
    if backbone.processor is None:
        raise ProcessorRequired(
            "a conversation needs the model's chat template: give the backbone its processor "
            "(Backbone(model, processor))"
        )
    return Conversations(backbone.processor)


def check_mode(mode: str) -> None:
    """Raise `ValueError` for a mode there is not."""
    if mode not in get_args(SessionMode):
        raise ValueError(f"mode {mode!r} is none of {', '.join(get_args(SessionMode))}")


def _asked(state: State) -> KameraWindow:
    assert state.window is not None
    return state.window


def _question(state: State) -> torch.Tensor:
    assert state.layout is not None
    prompt = state.layout.prompt
    return prompt.ids[question(prompt) :]


def _left(before: Layout, prompt: Rendered) -> int:
    """Tokens of the segments that the window held and the prompt no longer has."""
    held = {i for start, stop in before.runs for i in range(start, stop)}
    gone = difference(before.prompt, prompt).removed
    return sum(before.prompt.segments[i].num_tokens for i in gone if i in held)
