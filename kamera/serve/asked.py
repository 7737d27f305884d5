"""What is asked, whatever API it came by, and what was said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kamera.content import Fields, Message
from kamera.edits import Clearing
from kamera.sessions import Turn
from kamera.window import GUARANTEES, Guarantee

_ID = 256  # characters


@dataclass(frozen=True)
class Asked:
    """A request. What is None is left to the model's own settings.

    ``minimum`` is the least guarantee that may be served, ``session`` the id of its conversation, ``hint`` a
    name that its client gives to some of its conversations.
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
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
    hint: str = ""
    clearing: Clearing | None = None


@dataclass(frozen=True)
class Said:
    """An answer: text outside of calls, the calls, the stop string that ended it, the applied edit, and
    OpenAI's entry of each token of the text.
    """

    turn: Turn
    content: str
    calls: tuple[dict[str, Any], ...]
    stopped: str | None
    cleared: dict[str, Any] | None
    logprobs: list[dict[str, Any]] | None

    @property
    def noted(self) -> dict[str, Any] | None:
        """The entries of the text's tokens, as OpenAI's chat holds them."""
        return None if self.logprobs is None else {"content": self.logprobs, "refusal": None}

    @property
    def message(self) -> dict[str, Any]:
        """The answer in a history, as a client would send it back."""
        calls = {"tool_calls": list(self.calls)} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}

    @property
    def kamera(self) -> dict[str, Any]:
        """What the prompt's KV was worth, and where it came from, in tokens."""
        report = self.turn.report
        told = ("kept", "turned", "patched", "sampled", "prefilled", "left")
        counts = {name: getattr(report, name) for name in told}
        names = {"session_id": self.turn.session_id, "turn_id": self.turn.turn_id}
        return {"guarantee": report.guarantee, "mode": report.mode, **names, **counts}


def common(body: Fields, header: str | None) -> dict[str, Any]:
    """What all APIs share: ``kamera`` (the least guarantee, a session's id), ``session_id``, ``stream``."""
    own = body.inner("kamera", absent=True)
    minimum, named = own.take("minimum", str), own.take("session_id", str)
    own.done()
    if minimum is not None and minimum not in GUARANTEES:
        raise own.wrong("minimum", minimum, f"one of {', '.join(GUARANTEES)}")
    session = named or body.take("session_id", str) or header
    if session is not None and not (session.isprintable() and len(session) <= _ID):
        raise body.wrong("session_id", session, f"up to {_ID} printable characters")
    return {"minimum": minimum, "session": session or None, "stream": body.take("stream", bool, False)}
