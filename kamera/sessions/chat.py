"""`ChatSession`: a conversation on a window. Every change of its history is a cache edit."""

from __future__ import annotations

import contextlib
import copy
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kamera.content import Message, Rendered, copied
from kamera.edits import Directive, EditPolicy, Snap, edited, edited_messages
from kamera.engines import Account, Completes, HasEngine, Usage
from kamera.errors import KameraError
from kamera.reuse import Admission
from kamera.sessions.anchors import Anchors
from kamera.sessions.anticipation import Anticipation, Manner
from kamera.sessions.branches import History, whole_history
from kamera.sessions.document import locked
from kamera.sessions.engine_turns import EngineAnchors, anchors_over, answer_options, check_own, shown_over
from kamera.sessions.logprobs import noted_of
from kamera.sessions.modes import SessionMode, check_mode
from kamera.sessions.showing import Options, Shown, State, Turns
from kamera.sessions.stream import Stream
from kamera.sessions.tool_calls import call_form
from kamera.sessions.turn import Stopwatch, Turn, TurnReport, TurnUsage, spoken
from kamera.sessions.uncached import UNCACHEABLE, plain_answer
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import KameraWindow, Trace


class ChatSession:
    """A conversation whose history may be edited between turns, by its owner or by an ``edit_policy``.

    The leading system messages (and the template's own tokens before them) are the window's anchor; the other
    segments of the rendered conversation are its chunks. A turn compares its prompt with the previous one:
    equal segments are kept or relocated, new ones are prefilled. ``mode`` determines the KV of segments after
    an edit: ``"amortize"`` leaves it conditioned on the removed antecedents, ``"repair"`` patches it to the
    present ones, ``"forget"`` prefills it (equal to a run that never saw the removed ones), ``"auto"`` takes
    the cheapest that the reuse policy admits.

    ``uncached=True`` lets the plain model answer a prompt that no window can hold (it cannot be cut, its
    text spells a special token, it is longer than ``max_tokens``, …), with the reason in
    `TurnReport.uncached`. By default it is raised: prefilling everything is the caller's choice.

    ``reuse=True`` finds what came before in any conversation on the store, and serves it as far as it is
    admitted (docs/reuse.md). It is not saved.
    ``trace`` is a file of what its windows do, as for `KameraWindow` (`kamera view`); it is not saved.
    An ``engine`` (`kamera.engines.vllm.clients`) answers instead of the backbone; what it cannot do raises
    UnsupportedByEngine (docs/vllm.md).

    A turn works on a branch of the window, which replaces the window when the answer is complete: an error,
    also of a streamer, leaves the session unchanged. Turns and edits of several threads run one after
    another, and each goes on from the last; what names the history as a caller saw it (a whole history,
    directives) raises SessionConflict if another thread changed it while the call waited. `fork` never
    waits. Raises ProcessorRequired for a backbone without a processor or chat template.
    """

    def __init__(
        self,
        backbone: HasEngine,
        store: ChunkStore,
        *,
        tools: Sequence[Any] | None = None,
        mode: SessionMode = "auto",
        policy: ReusePolicy | None = None,
        edit_policy: EditPolicy | None = None,
        max_tokens: int | None = None,
        uncached: bool = False,
        reuse: bool = False,
        trace: str | Path | None = None,
        engine: Completes | None = None,
    ) -> None:
        told = None if trace is None else Trace(trace, session=secrets.token_hex(4))
        anchors = anchors_over(
            engine, backbone.engine, store, max_tokens=max_tokens, policy=policy, listener=told
        )
        if uncached or reuse:
            check_own(anchors, "uncached and reuse")
        settings: dict[str, Any] = {"tools": tools, "mode": mode, "edit_policy": edit_policy}
        self._set_up(anchors, uncached=uncached, reuse=reuse, **settings)

    @classmethod
    def among(cls, anchors: Anchors, **settings: Any) -> ChatSession:
        """One of several sessions that share ``anchors``; ``state`` is that of a session that goes on."""
        session = cls.__new__(cls)
        session._set_up(anchors, **settings)
        return session

    def _set_up(
        self,
        anchors: Anchors,
        *,
        tools: Sequence[Any] | None = None,
        mode: SessionMode = "auto",
        edit_policy: EditPolicy | None = None,
        uncached: bool = False,
        reuse: bool = False,
        state: State | None = None,
    ) -> None:
        check_mode(mode)
        self.backbone, self.store = anchors.backbone, anchors.store
        self.tools = tools
        self.mode: SessionMode = mode
        self.calls = call_form(self.backbone)
        self.uncached = uncached
        self._anchors, self._conversations = anchors, anchors.conversations
        self._edit_policy = edit_policy
        self._state = state or State()
        self._turns, self._account = Turns(), Account()
        self._ahead = Anticipation(self.backbone)
        self._reuse = reuse
        if state is not None and state.last is not None and anchors.branches.now(state.last) is None:
            anchors.branches.keep(state.last, None, (), state.messages)  # of another process

    @property
    def admissions(self) -> tuple[Admission, ...]:
        """Tier and reason of each segment of the last prompt, with ``reuse``; else none."""
        return self._state.admissions

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the history, answers included, before the edit policy."""
        return [copied(message) for message in self._state.messages]

    @property
    def prompt_ids(self) -> torch.Tensor:
        """A copy of the last prompt's tokens, int64 ``[tokens]``: the chat template over the conversation."""
        return torch.empty(0, dtype=torch.int64) if self._state.ids is None else self._state.ids.clone()

    @property
    def window(self) -> KameraWindow | None:
        """A fork of the window of the last prompt that a window could hold; None before the first.

        What is done in it changes nothing in the session. Over an engine it is a `DialogueWindow`.
        """
        window = self._state.window
        return None if window is None else self._anchors.fork(window)

    @property
    def state(self) -> State:
        """What stands: the history, and the window itself, which nobody else may change."""
        return self._state

    def usage(self) -> Usage:
        """The model work of this session, now and later, equal to hooks after `flush`; a fork has its own."""
        return self._account.usage

    def flush(self) -> None:
        """Wait for all later work of this session's window; raises as `KameraWindow.flush`."""
        if self._state.window is not None:
            self._state.window.flush()

    def rendered(self) -> Rendered:
        """The history after the chat template, cut into segments. Indices of directives refer to it."""
        return self._conversations.render(self._state.messages, tools=self.tools)

    def send(
        self,
        messages: str | Message | Sequence[Message],
        *,
        append: bool = False,
        after: str | None = None,
        scratch: Sequence[Message] = (),
        stream: Stream | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> Turn:
        """Answer the conversation; the answer joins the history.

        A list of ``messages`` is the client's whole present history, edited or not. Text and a single message
        are new messages; with ``append`` a list is, too. ``after`` is the id of an earlier turn, behind which
        all of them are new, and a system message at their head holds in place of its own: what came after it
        is neither in the history nor in the KV. ``scratch`` are messages behind them that this answer alone
        sees: neither the history nor any later token has seen them, in every mode, as in a run with this
        answer and without them. ``options`` (max_new_tokens, do_sample, streamer, …) go to ``generate`` of
        transformers; ``stream`` is told the answer as it is made, and ends it at its stop
        strings; ``seed`` draws the tokens apart from all other draws (`kamera.sessions.sampling`);
        ``logprobs``, a number of likeliest tokens, asks for `Turn.logprobs`. Raises EditPolicyFailed,
        `ValueError` for an option that it does not take (before anything runs), SessionConflict for a list
        that lacks what another thread was answered, UnknownTurn, and the errors of `Conversations.render` and
        of the window.
        """
        watch = Stopwatch(stream or Stream(), self.backbone, noted_of(logprobs, options))
        options = answer_options(self._anchors, watch, options, seed, logprobs)
        with self._account.now(self.backbone), self._turns.taken(self._state) as seen:
            base = self._state if after is None else self._behind(after)
            history = whole_history(base.messages, messages, append, branches=after is not None)
            if after is None:
                base.check_seen(seen, history)
            return self._answered(base, history, scratch, watch, options)

    def _answered(
        self, base: State, history: History, scratch: Sequence[Message], watch: Stopwatch, options: Any
    ) -> Turn:
        """The turn of `send`, which goes on from ``base``."""
        shaped = self._shaped(history)
        try:
            state, report, text = self._shown(shaped, [self.mode], base, None if scratch else options)
            branch = state
            if scratch:  # on a branch, which ends with the answer
                branch, extra, text = self._shown([*shaped, *scratch], [self.mode], state, options)
                report = report.and_then(extra, len(state.question))
        except UNCACHEABLE as error:
            if not self.uncached or watch.steps:
                raise
            inputs = self._conversations.whole([*shaped, *scratch], tools=self.tools)
            text, report = plain_answer(self.backbone, inputs, error, **options)
            state = branch = replace(base, ids=inputs["input_ids"][0].cpu())
        else:
            text = branch.asked.generate(branch.question, **options) if text is None else text
        said = spoken(text, watch.stream, self.calls, self.tools)
        self._ahead.answered(base.messages, history)
        self._state = state = state.answered((*history, said.message))
        self._anchors.branches.keep(state.changes[-1], base.last, base.messages, state.messages)
        report = replace(report, first_token=watch.seconds)
        prompt = 0 if branch.ids is None else int(branch.ids.shape[0])
        usage = TurnUsage(prompt, prompt - report.prefilled, watch.steps)
        reason = watch.stream.finish_reason(options.get("max_new_tokens"))
        ids = tuple(watch.stream.ids)
        return Turn(*said[:3], report, usage, ids, reason, state.changes[-1], watch.logprobs)

    def history(self, turn_id: str) -> list[dict[str, Any]]:
        """A copy of the messages up to a turn's answer. Raises UnknownTurn."""
        return [copied(message) for message in self._anchors.branches.history(turn_id)]

    def delete(self, turn_id: str) -> None:
        """Take a turn out of its conversation, from the middle, too; turns behind it stay, without it.

        The window follows as after any edit under the session's mode. Raises UnknownTurn.
        """
        with self._account.now(self.backbone), self._turns.taken(self._state):
            self._anchors.branches.leave(turn_id)
            left, state = self._anchors.branches.now(self._state.last), self._state
            if left is not None and len(left) < len(state.messages):
                state = replace(state, ids=None, layout=None, window=None)
                with contextlib.suppress(KameraError, ValueError):  # the next turn says what it is
                    state = self._shown(self._shaped(left), [self.mode]).state
                self._state = state.changed(messages=left)

    def next_token_logits(
        self, messages: str | Message | Sequence[Message] | None = None, *, append: bool = False
    ) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the first token of an answer; the history is unchanged.

        ``messages`` as for `send`; None means the present history.
        """
        with self._account.now(self.backbone), self._turns.taken(self._state):
            shaped = self._shaped(whole_history(self._state.messages, messages, append))
            try:
                state = self._shown(shaped, [self.mode]).state
            except UNCACHEABLE:
                if not self.uncached:
                    raise
                return self.backbone.ask_whole(self._conversations.whole(shaped, tools=self.tools))
            logits = state.asked.next_token_logits(state.question)
            self._state = state
        return logits

    def anticipate(self) -> None:
        """Prepare the next prompt's window, as later work, as far as that is foreseen (docs/sessions.md).

        What the edit policy removes next is known, and so is what a client's own rule removes, once its turns
        have shown it (`kamera.edits.Client`). The next turn never waits for it, and serves of it what its
        prompt has (`TurnReport.anticipated`).
        """
        if isinstance(self._anchors, EngineAnchors):
            with self._account.now(self.backbone):
                return self._anchors.prepare(self._state)
        manner = Manner(self.mode, self._edit_policy, self._anchors, self.tools, self._reuse)
        with self._account.now(self.backbone):
            self._ahead.begin(self._state, manner)

    def edit(self, directives: Sequence[Directive], *, snap: Snap = "refuse") -> TurnReport:
        """Apply directives to the history and to the window.

        Their indices refer to `rendered` before any of them (see `edited_messages`). The strictest of
        several modes applies to all, because segments after one edit are also after the earlier ones.
        Raises InvalidDirective, SessionConflict if another thread changed the history meanwhile, and the
        errors of `send` for a prompt that no window can hold.
        """
        with self._account.now(self.backbone), self._turns.taken(self._state) as seen:
            self._state.check_seen(seen)
            parts = self._conversations, self._state.messages, directives
            history = edited_messages(*parts, tools=self.tools, snap=snap)
            state, report, _ = self._shown(self._shaped(history), [d.mode for d in directives])
            self._state = state.changed(messages=tuple(history), last=None)
        return report

    def fork(self) -> ChatSession:
        """An independent session of the same history, without copying; that before an answer, during it."""
        branch = copy.copy(self)  # turns write to a branch, never to a session's window
        branch._turns, branch._account = Turns(), Account()
        branch._ahead = Anticipation(self.backbone)
        return branch

    def lend(self) -> ChatSession:
        """A new conversation, which may use what its first prompt and this one's window begin with."""
        branch = self.fork()
        branch._state = State(layout=self._state.layout, window=self._state.window, borrowed=True)
        return branch

    def save(self, path: str | Path, *, session_id: str | None = None) -> None:
        """Write the session to a directory of its own: history, pictures (as PNG), the window bit for bit.

        Replaces a session saved there in one step. ``session_id`` is noted as its id in a pool. An
        ``edit_policy`` is code and is not saved. Raises SessionConflict if this session was saved there and
        another went on from it, StoreError if the operating system refuses or the directory holds other
        files, `ValueError` for a message that JSON cannot hold, UnreadableMedia for a missing picture.
        """
        from kamera.sessions.persist import save_session

        check_own(self._anchors, "a saved session")
        with locked(Path(path)):
            save_session(Path(path), self, self._anchors, self._state, session_id)

    @classmethod
    def load(
        cls,
        path: str | Path,
        backbone: HasEngine,
        store: ChunkStore,
        *,
        edit_policy: EditPolicy | None = None,
        reuse: bool = False,
    ) -> ChatSession:
        """A saved session with its window; nothing in the window is prefilled again.

        Raises StoreError if there is none, CorruptChunk for a damaged one or a file of another session's,
        ForeignObject for one that was saved under another secret than the store's, StoreVersionError for one
        of another format, IncompatibleChunk for another model or tenant.
        """
        from kamera.sessions.persist import load_session

        account, engine = Account(), backbone.engine
        with account.now(engine):
            settings, state, policy, max_tokens = load_session(Path(path), engine, store)
        anchors = Anchors(engine, store, max_tokens=max_tokens, policy=policy)
        settings |= {"edit_policy": edit_policy, "reuse": reuse}
        session = cls.among(anchors, state=state, **settings)
        session._account = account
        return session

    # -- inside --------------------------------------------------------------------------------

    def _behind(self, turn_id: str) -> State:
        """The state from which a turn goes on behind any earlier one. Raises UnknownTurn."""
        history = self._anchors.branches.history(turn_id)
        borrowed = self._state.borrowed or turn_id != self._state.last
        return replace(self._state, messages=history, last=turn_id, borrowed=borrowed)

    def _shaped(self, history: Sequence[Message]) -> list[Message]:
        """The history after the edit policy."""
        if self._edit_policy is None:
            return list(history)
        return [*edited(self._edit_policy, history, self._state.turn)]

    def _shown(
        self,
        shaped: Sequence[Message],
        modes: Sequence[str],
        old: State | None = None,
        options: Options | None = None,
    ) -> Shown:
        """A state whose window holds the prompt of ``shaped``; ``old`` (the present one) is unchanged."""
        old = replace(old or self._state, ahead=self._ahead.take())
        with self.backbone.identity.steady():
            return shown_over(old, shaped, modes, self._anchors, self.tools, self._reuse, options)
