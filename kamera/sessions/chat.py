"""`ChatSession`: a conversation on a window. Every change of its history is a cache edit."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kamera import forks
from kamera.content import Message, Rendered, own_messages, shown_message
from kamera.edits import (
    EDITS,
    GONE,
    Directive,
    Edit,
    EditPolicy,
    Mode,
    Snap,
    Unit,
    begin_decay,
    due,
    edit_messages,
    followed,
    renewed,
    resolve,
    same,
    settled,
)
from kamera.engines import Account, Completes, HasEngine, Usage, engine_of
from kamera.errors import InvalidDirective, KameraError, StoreFull
from kamera.files import user_path
from kamera.patches import background_of
from kamera.sessions.anchors import Anchors, History, whole_history
from kamera.sessions.anticipation import Anticipation
from kamera.sessions.engine_turns import EngineAnchors, anchors_over, answer_options, refuse_over_engine
from kamera.sessions.grammar import Bound, Grammar
from kamera.sessions.layout import Manner, SessionMode, SessionWindow, check_mode, default_policy
from kamera.sessions.save import find_policy, load_session, lock_folder, read_document, save_session
from kamera.sessions.showing import UNCACHEABLE, Shown, State, answer_plainly, show, spoken_ids
from kamera.sessions.stream import (
    Options,
    Stream,
    Turn,
    TurnReport,
    TurnUsage,
    closing_ids,
    read_answer,
    refuse_own_options,
)
from kamera.store import ChunkStore, StoreAdmin, check_store, parse_duration
from kamera.trust import ReusePolicy
from kamera.window import KameraWindow, Trace, former_of

Spans = tuple[Rendered, list[Edit]] | None
"""Spans to be kept, of a prompt; None of none."""


class ChatSession:
    """A conversation whose history may be edited between turns, by its owner or by an ``edit_policy``.

    The leading system messages (and the template's own tokens before them) are the window's anchor; the other
    segments of the rendered conversation are its chunks. A turn compares its prompt with the previous one:
    equal segments are kept or relocated, new ones are prefilled. ``mode`` determines the KV of segments after
    an edit: ``"amortize"`` leaves it conditioned on the removed antecedents, ``"repair"`` patches it to the
    present ones, ``"forget"`` prefills it (equal to a run that never saw the removed ones), ``"auto"`` takes
    the cheapest that the reuse policy admits. Without a ``policy`` the KV of "auto" and "forget" is exact.

    ``anticipates``: after each answer what the next turn will drop is prepared (`anticipate`), as background
    work.

    ``uncached=True`` lets the plain model answer a prompt that no window can hold (it cannot be cut, its
    text spells a special token, it is longer than ``max_tokens``, …), with the reason in
    `TurnReport.uncached`. By default it is raised: prefilling everything is the caller's choice.

    ``reuse=True`` finds what came before in any conversation on the store, and serves it as far as it is
    admitted (docs/sessions.md). It is not saved.
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
        anticipates: bool = True,
        trace: str | Path | None = None,
        engine: Completes | None = None,
    ) -> None:
        check_store(store)
        own, listener = engine_of(backbone), None
        if trace is not None:
            listener = Trace(trace, session=secrets.token_hex(4))
        manner = Manner(tools, mode, edit_policy, uncached, reuse, anticipates)
        policy = default_policy(mode, reuse) if policy is None and engine is None else policy
        anchors = anchors_over(engine, own, store, max_tokens=max_tokens, policy=policy, listener=listener)
        if uncached or reuse:
            refuse_over_engine(anchors, "uncached and reuse")
        self._begin(anchors, manner, State())

    def _begin(self, anchors: Anchors, manner: Manner, state: State) -> None:
        self.backbone, self.store = anchors.backbone, anchors.store
        self.manner = manner
        self._anchors, self._conversations = anchors, anchors.conversations
        self.state = state
        self._lock, self._account = forks.Lock(), Account()
        self._anticipation = Anticipation(self.backbone)

    @property
    def state(self) -> State:
        """What a turn replaces. The window in it is written to by no turn: each works on a branch."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._anchors.trail.add(state)

    @property
    def edit_policy(self) -> EditPolicy | None:
        """What edits the history before each turn; it may be set between turns."""
        return self.manner.edit_policy

    @edit_policy.setter
    def edit_policy(self, policy: EditPolicy | None) -> None:
        self.manner = replace(self.manner, edit_policy=policy)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the history, answers included, before the edit policy, with the media that it ran."""
        return [shown_message(message) for message in self.state.messages]

    @property
    def prompt_ids(self) -> torch.Tensor:
        """A copy of the last prompt's tokens, int64 ``[tokens]``: the chat template over the conversation."""
        return torch.empty(0, dtype=torch.int64) if self.state.ids is None else self.state.ids.clone()

    @property
    def window(self) -> SessionWindow | None:
        """A fork of the window of the last prompt that a window could hold; None before the first.

        What is done in it changes nothing in the session. Over an engine it is a `EngineWindow`.
        """
        window = self.state.window
        return None if window is None else self._anchors.fork(window)

    def usage(self) -> Usage:
        """The model work of this session, now and later, equal to hooks after `flush`; a fork has its own."""
        return self._account.usage

    def flush(self) -> None:
        """Wait for all background work of this session's backbone; raises as `KameraWindow.flush`."""
        background_of(self.backbone).flush()

    def render(self) -> Rendered:
        """The history after the chat template, cut into segments. Indices of directives refer to it."""
        return self._conversations.render(self.state.messages, tools=self.manner.tools)

    def send(
        self,
        messages: str | Message | Sequence[Message],
        *,
        append: bool = False,
        after: str | None = None,
        scratch: Sequence[Message] = (),
        directives: Sequence[Directive] = (),
        mode: SessionMode | None = None,
        stream: Stream | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        **options: Any,
    ) -> Turn:
        """Answer the conversation; the answer joins the history.

        A list of ``messages`` is the client's whole present history, edited or not. Text and a single message
        are new messages; with ``append`` a list is, too. ``after`` is the id of an earlier turn, behind which
        all of them are new, and a system message at their head holds in place of its own: what came after it
        is neither in the history nor in the KV. ``scratch`` are messages behind them that this answer alone
        sees: neither the history nor any later token has seen them, in every mode, as in a run with this
        answer and without them. ``directives`` act on the history with the new messages, whose prompt the
        indices of all refer to: it is edited before the answer, spans of it are kept or decay; ``mode`` is
        that of a client's own edit of this turn, in place of the session's (the strictest of it and of the
        edits' holds). ``options``
        (max_new_tokens, do_sample, streamer, …) go to ``generate`` of transformers; ``stream`` is told the
        answer as it is made, and ends it at its stop strings; ``seed`` draws the tokens apart from all other
        draws (`kamera.sessions.stream`); ``logprobs``, a number of likeliest tokens, asks for
        `Turn.logprobs`; ``grammar`` says what the answer has to be, JSON of a schema or a call. Raises
        EditPolicyFailed, `ValueError` for an option that it does not take, InvalidRequest for a schema that
        cannot be compiled (both before anything runs), SessionConflict for a list that lacks what another
        thread was answered, UnknownTurn, and the errors of `Conversations.render` and of the window.
        """
        refuse_own_options(options, ChatSession)
        if mode is not None:
            check_mode(mode)
        stream = stream or Stream()
        bound = None if grammar is None else Bound(grammar, self._anchors.calls, self.manner.tools)
        options = answer_options(self._anchors, stream, options, seed, logprobs, bound)
        messages, scratch = self._own(messages), self._own(scratch)
        with self._change() as old_state:
            base = self.state if after is None else self._behind(after)
            history = whole_history(base.messages, messages, append, branches=after is not None)
            if after is None:
                base.check_seen(old_state, history)
            modes = [*([] if mode is None else [mode]), *[d.mode for d in directives if d.verb in EDITS]]
            kept = self._spans_to_keep(history, directives)
            old_history, history = history, self._edited(history, directives)
            decays = self._decays(base, old_history, history, directives, 1)
            turn = self._answer(base, history, decays, kept, scratch, modes, stream, options)
        if self.manner.anticipates:
            self.anticipate()
        return turn

    def _answer(
        self,
        base: State,
        history: History,
        decays: Sequence[Directive],
        kept: Spans,
        scratch: Sequence[Message],
        modes: Sequence[str],
        stream: Stream,
        options: Any,
    ) -> Turn:
        """The turn of `send`, which goes on from ``base``."""
        (shaped_history, more_modes), tools = self._shape(history, decays), self.manner.tools
        try:
            modes = [*modes, *more_modes]
            state, report, text = self._show(shaped_history, base, None if scratch else options, modes)
            branch = state
            if scratch:  # on a branch, which ends with the answer
                branch, extra, text = self._show([*shaped_history, *scratch], state, options)
                report = report.and_then(extra, len(state.question))
        except UNCACHEABLE as error:
            if not self.manner.uncached or stream.steps:
                raise
            inputs = self._conversations.whole([*shaped_history, *scratch], tools=tools)
            text, report = answer_plainly(self.backbone, inputs, error, **options)
            state = branch = replace(base, ids=inputs["input_ids"][0].cpu())
        assert text is not None, "options were given"
        text, content, calls, message = read_answer(text, stream, self._anchors.calls, tools)
        message = self._conversations.spoken(message)
        is_said = not scratch and report.uncached is None
        misses = 0
        if report.uncached is None and state.layout is not None:
            misses = self.state.prefix_misses(state.layout.prompt)
        self._anticipation.habits.remember(base.messages, history, misses)
        self._keep(state, kept)
        decays = settled(decays, due(decays, self.state.turn, time.time())) if decays else ()
        state = replace(state, spoken=spoken_ids(state, stream.ids) if is_said else None, decays=decays)
        self._publish(state.after_turn((*history, message)))
        state = self.state
        self._anchors.branches.keep(state.changes[-1], base.last, base.messages, state.messages)
        report = replace(report, first_token=stream.seconds)
        prompt = 0 if branch.ids is None else int(branch.ids.shape[0])
        usage = TurnUsage(prompt, prompt - report.prefilled, len(stream.ids))
        reason = stream.finish_reason(options.get("max_new_tokens"), closing_ids(self.backbone, options))
        ids = tuple(stream.ids)
        return Turn(text, content, calls, report, usage, ids, reason, state.changes[-1], stream.logprobs)

    def history(self, turn_id: str) -> list[dict[str, Any]]:
        """A copy of the messages up to a turn's answer. Raises UnknownTurn."""
        return [shown_message(message) for message in self._anchors.branches.history(turn_id)]

    def delete(self, turn_id: str) -> None:
        """Take a turn out of its conversation, from the middle, too; turns behind it stay, without it.

        The window follows as after any edit under the session's mode. Raises UnknownTurn.
        """
        with self._change():
            self._anchors.branches.remove_turn(turn_id)
            history, state = self._anchors.branches.history_or_none(self.state.last), self.state
            if history is not None and len(history) < len(state.messages):
                decays = self._decays(state, history, history)
                state = replace(state, ids=None, layout=None, window=None, decays=decays)
                with contextlib.suppress(KameraError, ValueError):  # the next turn says what it is
                    state = replace(self._show(self._shape(history, decays)[0]).state, decays=decays)
                self.state = state.after_change(messages=history)

    def next_token_logits(
        self, messages: str | Message | Sequence[Message] | None = None, *, append: bool = False
    ) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the first token of an answer; the history is unchanged.

        ``messages`` as for `send`; None means the present history.
        """
        refuse_over_engine(self._anchors, "logits")
        messages = self._own(messages)
        with self._change():
            whole = whole_history(self.state.messages, messages, append)
            history, modes = self._shape(whole, self._decays(self.state, whole, whole))
            try:
                state = self._show(history, modes=modes).state
            except UNCACHEABLE:
                if not self.manner.uncached:
                    raise
                return self.backbone.plain.logits(self._conversations.whole(history, tools=self.manner.tools))
            assert isinstance(state.window, KameraWindow), "it holds the prompt"
            logits = state.window.next_token_logits(state.question)
            self.state = state
        return logits

    def anticipate(self) -> None:
        """Prepare the next prompt's window in the background, as far as it is foreseen (docs/sessions.md).

        What the edit policy removes next is known, and so is what a client's own rule removes, once a turn
        has shown it (`kamera.edits.Client`). The next turn never waits for it, and serves of it what its
        prompt has (`TurnReport.anticipated`). After two wrong guesses in a row a client's rule has to be
        seen at work twice. In all no more tokens are prepared than a prefix cache would have run for the
        turns so far. What was prepared for this history already is left as it is.
        """
        with self._account.count_now(self.backbone):
            if isinstance(self._anchors, EngineAnchors):
                self._anchors.prepare(self.state.window)
            else:
                self._anticipation.begin(self.state, self._anchors, self.manner)

    def edit(self, directives: Sequence[Directive], *, snap: Snap = "refuse") -> TurnReport:
        """Apply directives to the history and to the window.

        Their indices refer to `render` before any of them (see `edit_messages`). The strictest of
        several modes applies to all, because segments after one edit are also after the earlier ones.
        Spans are shared and pinned, too, and decay.
        Raises InvalidDirective, SessionConflict if another thread changed the history meanwhile, and the
        errors of `send` for a prompt that no window can hold.
        """
        with self._change() as old_state:
            self.state.check_seen(old_state)
            old, kept = self.state, self._spans_to_keep(self.state.messages, directives)
            history = self._edited(old.messages, directives, snap)
            decays = self._decays(old, old.messages, history, directives)
            shaped_history, modes = self._shape(history, decays)
            modes += [directive.mode for directive in directives if directive.verb in EDITS]
            state, report, _ = self._show(shaped_history, modes=modes)
            self._keep(state, kept)
            last = None if any(directive.verb in EDITS for directive in directives) else old.last
            self._publish(state.after_change(messages=history, last=last, decays=decays))
        return report

    def evict(self, span: tuple[int, int], *, unit: Unit = "messages", mode: Mode = "auto") -> TurnReport:
        """Take ``start:end`` out of the history and the window: a `Directive` without a replacement."""
        return self.edit([Directive(*span, mode=mode, unit=unit)])

    def share(self, span: tuple[int, int], *, unit: Unit = "messages") -> tuple[str, ...]:
        """Store the canonicals of ``start:end`` now, for other sessions on this store; the ids of its chunks.

        A chunk that the span touches only in part is stored whole. The last answer, which no window holds
        yet, is left out. Runs a forward for each chunk whose canonical is not stored. Raises
        InvalidDirective for a span outside of `render`, StoreFull if the store does not have them then.
        """
        return self._keep_span(Directive(*span, unit=unit, verb="share"))

    def pin(
        self, span: tuple[int, int], *, ttl: float | str | None = None, unit: Unit = "messages"
    ) -> tuple[str, ...]:
        """`share` a span, and keep its objects through `StoreAdmin.gc` and limits; the ids of its chunks.

        ``ttl`` is seconds, or text such as ``"12h"``; None: until `StoreAdmin.unpin`. Raises as `share`, and
        PinsFull.
        """
        seconds = None if ttl is None else parse_duration(ttl)
        return self._keep_span(Directive(*span, unit=unit, verb="pin", seconds=seconds))

    def decay(
        self,
        span: tuple[int, int],
        *,
        turns: int | None = None,
        ttl: float | str | None = None,
        replacement: str | None = None,
        mode: Mode = "auto",
    ) -> None:
        """Let the messages ``start:end`` leave the prompt by themselves, for a ``replacement`` or nothing.

        ``turns`` more turns see them; ``ttl`` is seconds, or text such as ``"12h"``; whichever comes first.
        They stay in `messages`, as what an edit policy removes. A later decay of any of them, or a pin, holds
        in place of this one; it ends if the client edits them. Raises InvalidDirective if the prompt cannot
        do without them, SessionConflict as `edit`.
        """
        seconds = None if ttl is None else parse_duration(ttl)
        directive = Directive(*span, replacement, mode, "messages", "decay", turns, seconds)
        with self._change() as old_state:
            state = self.state
            state.check_seen(old_state)
            decays = self._decays(state, state.messages, state.messages, [directive])
            self.state = replace(state, decays=decays)

    def fork(self) -> ChatSession:
        """An independent session of the same history, without copying; that before an answer, during it."""
        return open_session(self._anchors, self.manner, self.state)

    def save(self, path: str | Path, *, session_id: str | None = None) -> None:
        """Write the session to a directory of its own: history, pictures (as PNG), the window bit for bit.

        Replaces a session saved there in one step. ``session_id`` is noted as its id in a pool. Raises
        SessionConflict if this session was saved there and another went on from it, StoreError if the
        operating system refuses or the directory holds other files, `ValueError` for a message that JSON
        cannot hold, UnreadableMedia for a missing picture.
        """
        refuse_over_engine(self._anchors, "a saved session")
        folder = user_path(path)
        with lock_folder(folder):
            save_session(folder, self.state, self._anchors, self.manner, session_id)

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

        Its edit policy is made again; one that is not Kamera's, or was given a function, has to be given.
        Raises StoreError if there is none, CorruptChunk for a damaged one or a file of another session's,
        ForeignObject for one that was saved under another secret than the store's, StoreVersionError for one
        of another format, IncompatibleChunk for another model, tenant or edit policy.
        """
        check_store(store)
        engine = engine_of(backbone)
        folder = user_path(path)
        document = read_document(folder, store)
        edit_policy = find_policy(folder, document, edit_policy)
        anchors = Anchors(engine, store, max_tokens=document.max_tokens, policy=document.policy)
        manner = Manner(document.tools, document.mode, edit_policy, document.uncached, reuse)
        session = open_session(anchors, manner)
        with session._account.count_now(session.backbone):
            session.state = load_session(folder, document, anchors)
        return session

    # -- inside --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[State]:
        """Context of one change, which waits for those of other threads: the state seen before that.

        Raises ValueError inside of another change of the same thread, whose state would replace this one's.
        """
        old_state = self.state
        if self._lock.is_mine:
            raise ValueError("this session is in the midst of an answer: use session.fork() in a streamer")
        with self._account.count_now(self.backbone), self._lock:
            yield old_state

    def _own(self, messages: Any) -> Any:
        """Messages, or a user's text; their media are read now, and nobody's else. Raises UnreadableMedia."""
        if isinstance(messages, str):
            messages = self._conversations.spoken({"role": "user", "content": messages})
        return own_messages(messages, self.backbone.builder.limits)

    def _publish(self, state: State) -> None:
        """Go on with ``state``. What its client has edited away may come back, and is kept for a while."""
        old, self.state = self.state, state
        if not same(state.messages[: len(old.messages)], old.messages):
            self._anchors.leave(old)

    def _behind(self, turn_id: str) -> State:
        """The state from which a turn goes on behind any earlier one. Raises UnknownTurn."""
        history = self._anchors.branches.history(turn_id)
        state = replace(self.state, messages=history, last=turn_id)
        state = replace(state, decays=self._decays(self.state, history, history))
        return state if turn_id == self.state.last else replace(state, layout=None, window=None, spoken=None)

    def _shape(
        self, history: Sequence[Message], decays: Sequence[Directive] = ()
    ) -> tuple[list[Message], list[Mode]]:
        """The history without what has decayed and after the edit policy; modes of what leaves by either."""
        turn = self.state.turn
        left = due(decays, turn, time.time()) if decays else []
        shaped_history, modes = self.manner.shape(self._conversations, history, turn, left)
        return shaped_history, [*modes, *[d.mode for d in left if d.turns != GONE]]

    def _edited(
        self, history: Sequence[Message], directives: Sequence[Directive], snap: Snap = "refuse"
    ) -> History:
        """The history after the edits among the directives. Raises InvalidDirective."""
        edits = [directive for directive in directives if directive.verb in EDITS]
        parts = self._conversations, history, edits
        edited = edit_messages(*parts, tools=self.manner.tools, snap=snap) if edits else history
        return tuple([dict(message) for message in edited])

    def _decays(
        self,
        base: State,
        old_history: Sequence[Message],
        history: Sequence[Message],
        directives: Sequence[Directive] = (),
        answers: int = 0,
    ) -> tuple[Directive, ...]:
        """What decays in a ``history``, which directives on ``old_history`` made, ``answers`` to come.

        Raises InvalidDirective for a span that the prompt cannot do without.
        """
        if not (base.decays or directives):
            return ()
        new = [d for d in directives if d.verb == "decay"]
        for directive in new:
            self.manner.render(
                self._conversations,
                self.manner.shape(self._conversations, old_history, self.state.turn, [directive])[0],
            )
        old = followed(base.decays, base.messages, old_history)
        old = renewed(old, [d for d in directives if d.verb in ("decay", "pin") and d.unit == "messages"])
        begun = [begin_decay(d, self.state.turn + answers, time.time()) for d in new]
        return followed([*old, *begun], old_history, history)

    def _keep_span(self, directive: Directive) -> tuple[str, ...]:
        with self._change():
            state = self.state
            if state.window is None:
                raise InvalidDirective("no turn was sent yet: there is no KV to keep")
            chunk_ids = self._keep(state, self._spans_to_keep(state.messages, [directive]))
            decays = self._decays(state, state.messages, state.messages, [directive])
            self.state = replace(state, decays=decays) if decays != state.decays else state
        return chunk_ids

    def _spans_to_keep(self, history: Sequence[Message], directives: Sequence[Directive]) -> Spans:
        """The spans that are shared or pinned, in the prompt of a history. Raises InvalidDirective."""
        kept = [directive for directive in directives if directive.verb in ("share", "pin")]
        if not kept:
            return None
        refuse_over_engine(self._anchors, "share and pin")
        prompt = self.manner.render(self._conversations, history)
        return prompt, [resolve([d], prompt, self._conversations.tokenize, snap="widen")[0] for d in kept]

    def _keep(self, state: State, spans: Spans) -> tuple[str, ...]:
        """Store the canonicals of spans in a state's window, and pin them; the ids of all chunks.

        Raises InvalidDirective without a window, StoreFull if the store does not have them then, PinsFull.
        """
        if spans is None:
            return ()
        layout, window = state.layout, state.window
        if layout is None or window is None:
            raise InvalidDirective("no window holds this prompt: there is no KV to keep")
        window = self._anchors.fork(window)
        assert isinstance(window, KameraWindow), "over no engine"
        context, all_ids = former_of(window).context, list[tuple[str, ...]]()
        segments, prompt = layout.prompt.segments, spans[0].cut_as(layout.prompt)
        for edit in spans[1]:
            ids = {s.id for s in prompt.segments if s.start < edit.stop and edit.start < s.stop}
            runs = zip(window.slots, layout.runs, strict=True)
            slots = [slot for slot, run in runs if ids & {s.id for s in segments[slice(*run)]}]
            for slot in slots:
                if not self.store.has(context, slot.chunk_id):
                    window.condition(slot, False)  # of a fork: it is formed and stored
            all_ids.append(tuple(dict.fromkeys(slot.chunk_id for slot in slots)))
        self.flush()
        for edit, chunk_ids in zip(spans[1], all_ids, strict=True):
            missing_count = sum(not self.store.has(context, chunk_id) for chunk_id in chunk_ids)
            if missing_count:  # a window goes on without its store, but who shares wants to know
                at = edit.directive
                raise StoreFull(
                    f"{missing_count} of {len(chunk_ids)} chunks of {at.start}:{at.end} are not in "
                    f"{self.store.url}, which had no room or refused them: see the log, mend it, "
                    "share again"
                )
        for edit, chunk_ids in zip(spans[1], all_ids, strict=True):
            if edit.directive.verb == "pin" and chunk_ids:
                StoreAdmin(self.store).pin(chunk_ids, edit.directive.seconds)
        return tuple(dict.fromkeys(chunk_id for chunk_ids in all_ids for chunk_id in chunk_ids))

    def _show(
        self,
        shaped_history: Sequence[Message],
        old: State | None = None,
        options: Options | None = None,
        modes: Sequence[str] = (),
    ) -> Shown:
        """A state whose window holds the prompt of a history; ``old`` (the present one) is unchanged."""
        old, modes = (
            replace(old or self.state, next_state=self._anticipation.take_prepared()),
            modes or [self.manner.mode],
        )
        return show(old, shaped_history, modes, self._anchors, self.manner, options)


def open_session(anchors: Anchors, manner: Manner, state: State | None = None) -> ChatSession:
    """One of several sessions that share ``anchors``; ``state`` is that of a session that goes on."""
    session = ChatSession.__new__(ChatSession)
    session._begin(anchors, manner, state or State())
    return session
