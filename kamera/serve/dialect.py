"""What the three APIs have in common: a request is read, an answer written, whole or as events."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any, cast, get_args

from kamera.content import Fields, Format, Message, chat_message
from kamera.edits import Clearing, Directive, Mode, Unit, Verb
from kamera.errors import InvalidDirective, InvalidRequest
from kamera.serve.refusal import Refusal
from kamera.sessions import SessionMode, Turn
from kamera.trust import GUARANTEES, Guarantee

Events = list[dict[str, Any] | str]
"""Data of server-sent events, each named by its ``type`` if it has one; a text stands for itself."""

_ID = 256  # characters

HARMLESS: tuple[tuple[str, type[Any]], ...] = (("service_tier", str), ("prompt_cache_retention", str))
"""Entries of OpenAI's APIs that change nothing here, and their kinds."""


@dataclass(frozen=True)
class Asked:
    """A request. What is None is left to the model's own settings.

    A call of one of the tools in ``forced`` has to be made, and no second one in a ``single`` answer; one
    without calls has the ``format``. ``minimum`` is the least guarantee that may be served, ``session`` the
    id of its conversation, ``hint`` a name that its client gives to some of its conversations. ``after`` is
    the turn that the messages go on from, with its system message unless it is asked ``anew``.
    ``directives``, ``mode`` and ``scratch`` as for `ChatSession.send`.
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    forced: tuple[str, ...] = ()
    single: bool = False
    format: Format | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: int | None = None
    minimum: Guarantee | None = None
    session: str | None = None
    after: str | None = None
    anew: bool = False
    hint: str = ""
    clearing: Clearing | None = None
    directives: tuple[Directive, ...] = ()
    mode: SessionMode | None = None
    scratch: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Said:
    """An answer: text outside of calls, the calls, the stop string that ended it, the applied edit, and
    OpenAI's entry of each token of the text. ``dropped`` are entries of messages that the template has no
    place for.
    """

    turn: Turn
    content: str
    calls: tuple[dict[str, Any], ...]
    stopped: str | None
    cleared: dict[str, Any] | None
    logprobs: list[dict[str, Any]] | None
    dropped: tuple[str, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer in a history, as a client would send it back."""
        calls = {"tool_calls": list(self.calls)} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}

    @property
    def kamera(self) -> dict[str, Any]:
        """What the prompt's KV was worth, and where it came from, in tokens."""
        report = self.turn.report
        told = ("kept", "turned", "patched", "prefilled", "left")
        counts = {name: getattr(report, name) for name in told}
        names = {"session_id": self.turn.session_id, "turn_id": self.turn.turn_id}
        dropped = {"dropped": [*self.dropped]} if self.dropped else {}
        return {"guarantee": report.guarantee, "mode": report.mode, **names, **counts, **dropped}


class Dialect:
    """One request in one API's words, and its answer.

    ``asked`` is read from the ``body`` at construction, which raises InvalidRequest. Each API writes the
    answer as one object (``whole_answer``), or as events: ``opening_events`` before the first text,
    ``piece_events`` for each text, ``closing_events`` with calls and usage; `error_events` if it breaks off.
    """

    prefix = ""

    def __init__(self, body: Fields, asked: Asked) -> None:
        self.model = body.need("model", str)
        body.finish()
        self.asked = asked
        self.id = self.prefix + secrets.token_hex(12)
        self.created = int(time.time())

    def error_events(self, refusal: Refusal) -> Events:
        """Events of an error behind the first text."""
        return [refusal.openai()]


def common(body: Fields, header: str | None, hottest: int) -> dict[str, Any]:
    """What all APIs share: ``kamera`` (the least guarantee, ids of session and turn, directives, a
    mode, scratch messages in OpenAI's form), ``session_id``, ``stream``, ``top_p``, ``temperature``.
    """
    own = body.take_object("kamera", absent=True)
    minimum, named, after, mode = (own.take(n, str) for n in ("minimum", "session_id", "after", "mode"))
    directives = tuple([_directive(one, mode) for one in own.objects("directives")])
    scratch = tuple([chat_message(one) for one in own.objects("scratch")])
    own.finish()
    if minimum is not None and minimum not in GUARANTEES:
        raise own.wrong("minimum", minimum, f"one of {', '.join(GUARANTEES)}")
    if mode is not None and mode not in get_args(SessionMode):
        raise own.wrong("mode", mode, f"one of {', '.join(get_args(SessionMode))}")
    session = named or body.take("session_id", str) or header
    if session is not None and not (session.isprintable() and len(session) <= _ID):
        raise body.wrong("session_id", session, f"up to {_ID} printable characters")
    options = {"temperature": body.number("temperature", 0, hottest), "top_p": body.number("top_p", 0, 1)}
    where = {"minimum": minimum, "session": session or None, "after": after}
    edits = {"directives": directives, "mode": mode, "scratch": scratch}
    return {**options, **where, **edits, "stream": body.take("stream", bool, False)}


def _directive(given: Fields, mode: str | None) -> Directive:
    """A directive of the strictest mode, unless it or its request says another."""
    start, end = (given.need(name, int) for name in ("start", "end"))
    replacement, unit = given.take("replacement", str), given.take("unit", str, "messages")
    own, verb = given.take("mode", str, mode or "forget"), given.take("verb", str, "edit")
    time = given.count("turns", 0), given.number("seconds", 0, 2**63)
    given.finish()
    try:
        return Directive(start, end, replacement, cast(Mode, own), cast(Unit, unit), cast(Verb, verb), *time)
    except InvalidDirective as error:
        raise InvalidRequest(f"{given.place('')[:-1]}: {error}", given.place("")[:-1]) from None
