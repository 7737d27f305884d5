"""Answer and cost of a turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kamera.engines import Spent
from kamera.reuse import Admission
from kamera.sessions.modes import Applied
from kamera.sessions.stream import FinishReason, Logprob, Stream
from kamera.sessions.tool_calls import CallForm, Calls
from kamera.trust import Guarantee, weakest
from kamera.window import KameraWindow, Report, Slot, former_of


@dataclass(frozen=True)
class TurnReport:
    """Cost of bringing the cache to a turn's prompt.

    Tokens of the prompt, each counted once: ``kept`` in place, ``turned`` (relocated), ``patched`` (a stored
    patch for new antecedents, no forward), ``prefilled``. ``left`` are tokens that the prompt no longer has.
    ``forwards``, ``tokens_recomputed`` (canonicals formed in between included) and ``vision_encodes`` are
    measured, with those of a system prompt that was new, and exclude the answer's own. After
    ``session.edit`` the last tokens of ``prefilled``, which ask for an answer, have not run yet.
    ``guarantee`` is the weakest in the window, ``mode`` the mode that was applied (the one chosen, of
    "auto"). ``uncached`` is the reason if the plain model answered (``session.send`` with
    ``uncached=True``); None if the window did.
    ``first_token``: seconds from the request to the logits of the answer's first token, edit policy and
    template included; None without an answer (``session.edit``). ``anticipated`` are those of the kept
    tokens that stand in place because they were prepared after the answer before (`ChatSession.anticipate`):
    0 if what was prepared is not this prompt's, None if nothing was. ``admissions``: tier and reason of each
    segment, with ``reuse``.
    """

    prefilled: int
    forwards: int
    tokens_recomputed: int
    vision_encodes: int
    seconds: float
    guarantee: Guarantee
    mode: Applied
    kept: int = 0
    turned: int = 0
    patched: int = 0
    left: int = 0
    notes: tuple[str, ...] = ()
    uncached: str | None = None
    first_token: float | None = None
    anticipated: int | None = None
    admissions: tuple[Admission, ...] = ()

    def and_then(self, scratch: TurnReport, unasked: int) -> TurnReport:
        """This report with the work of a branch behind it, whose tokens leave with the answer.

        The last ``unasked`` tokens of this report's prompt ask for an answer, which is the branch's: they did
        not run.
        """
        return replace(
            self,
            prefilled=self.prefilled - unasked + scratch.prefilled,
            forwards=self.forwards + scratch.forwards,
            tokens_recomputed=self.tokens_recomputed + scratch.tokens_recomputed,
            vision_encodes=self.vision_encodes + scratch.vision_encodes,
            seconds=self.seconds + scratch.seconds,
            guarantee=weakest((self.guarantee, scratch.guarantee)),
            notes=(*self.notes, *scratch.notes),
        )


class TurnUsage(NamedTuple):
    """Tokens of a turn: its prompt, the part of it whose KV was at hand, and the answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Turn:
    """An answer: its text, the tool calls in it, the report of its prompt, and its tokens.

    ``content`` is the text outside of the calls, which are in OpenAI's form: arguments are JSON in a text.
    ``token_ids`` are the answer's, closing ones included; none of beam search. ``turn_id`` names the history
    up to this answer, and no other ever. ``logprobs`` has an entry for each token, None if they were not
    asked for. ``session_id`` names the session of a `SessionPool` that answered.
    """

    text: str
    content: str
    tool_calls: Calls
    report: TurnReport
    usage: TurnUsage
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    turn_id: str
    logprobs: tuple[Logprob, ...] | None = None
    session_id: str | None = None


def read_answer(
    text: str, stream: Stream, form: CallForm, tools: Sequence[Any] | None
) -> tuple[str, str, Calls, dict[str, Any]]:
    """The answer ``text`` up to a stop string, what of it is no tool call, the calls, and its message.

    In the history it is as it was said. Special tokens cannot be: the template is given calls with them.
    """
    text = stream.finish(text)
    content, calls = form.parse(stream.text_with_calls(text, form), tools)
    text = form.without_special_tokens(text)
    fields = {"content": content, "tool_calls": list(calls)} if form.special and calls else {"content": text}
    return text, content, calls, {"role": "assistant", **fields}


def turn_report(
    old_slots: Sequence[Slot],
    report: Report,
    window: KameraWindow,
    opening: Spent,
    prompt: int,
    mode: Applied,
    admissions: tuple[Admission, ...] = (),
) -> TurnReport:
    """The report of an operation from the ``old_slots`` to a prompt of ``prompt`` tokens.

    ``opening`` is the work of prefilling the ``window``'s system prompt, whose tokens were kept if that is
    none. Those after the slots are prefilled with the question. A chunk that arrived without a forward came
    from the store: its tokens count as turned.
    """
    old_by_number, anchor = {slot.number: slot for slot in old_slots}, former_of(window).anchor.length
    kept, turned, patched = report.tokens_held + (0 if opening.tokens else anchor), 0, 0
    for slot in report.slots:
        old = old_by_number.get(slot.number)
        if old is None or (old.antecedents, old.rank) != (slot.antecedents, slot.rank):
            patched += slot.length if slot.rank else 0
        elif old.position == slot.position:
            kept += slot.length
        else:
            turned += slot.length
    question = prompt - anchor - sum([slot.length for slot in report.slots])
    recomputed = opening.tokens + report.tokens_recomputed
    prefilled = min(prompt - kept - turned - patched, recomputed + question)
    return TurnReport(
        kept=kept,
        turned=prompt - kept - patched - prefilled,
        patched=patched,
        prefilled=prefilled,
        forwards=opening.forwards + report.forwards,
        tokens_recomputed=recomputed,
        vision_encodes=opening.vision_encodes + report.vision_encodes,
        seconds=opening.seconds + report.seconds,
        guarantee=weakest(slot.guarantee for slot in report.slots),
        mode=mode,
        notes=report.notes,
        admissions=admissions,
    )
