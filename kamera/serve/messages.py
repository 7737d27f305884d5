"""``/v1/messages``: Anthropic's messages, read and written."""

from __future__ import annotations

import json
from typing import Any

from sse_starlette import ServerSentEvent

from kamera.content import Fields, anthropic_messages, anthropic_tools, content_of
from kamera.edits import clearing_of
from kamera.errors import InvalidRequest
from kamera.serve.dialect import Asked, Dialect, Events, Said, common, event
from kamera.serve.refusal import Refusal


class Messages(Dialect):
    """A message; with ``counts`` a request whose tokens are only counted."""

    prefix = "msg_"

    def __init__(self, body: Fields, session: str | None = None, *, counts: bool = False) -> None:
        system: list[dict[str, Any]] = []
        if "system" in body:
            system = [{"role": "system", "content": content_of(body, "system", pictures=False)}]
        messages = [made for m in body.objects("messages", needed=True) for made in anthropic_messages(m)]
        user = body.inner("metadata", absent=True)
        asked = Asked(
            messages=[*system, *messages],
            tools=anthropic_tools(body),
            max_tokens=body.count("max_tokens"),
            top_k=body.count("top_k", 0),
            stop=body.texts("stop_sequences", 16),
            hint=user.take("user_id", str, ""),
            clearing=clearing_of(body.inner("context_management", absent=True)),
            **common(body, session, 1),
        )
        user.finish()
        body.only(thinking={"type": "disabled"}, service_tier=("auto", "standard_only"))
        super().__init__(body, asked)
        if asked.max_tokens is None and not counts:
            raise InvalidRequest("max_tokens is missing: give a whole number", "max_tokens")
        self._blocks = 0
        self._open = False  # the text, which is the first block

    def whole(self, said: Said) -> dict[str, Any]:
        text = [{"type": "text", "text": said.content}] if said.content or not said.calls else []
        uses = [{**_use(c), "input": json.loads(c["function"]["arguments"])} for c in said.calls]
        return {**self._head([*text, *uses], _usage(said)), **_end(said), **_edits_and_worth(said)}

    def opening(self) -> Events:
        """The message without content; its usage comes at the end."""
        head = self._head([], {"input_tokens": 0, "output_tokens": 0})
        return [_event("message_start", message={**head, "stop_reason": None, "stop_sequence": None})]

    def piece(self, text: str) -> Events:
        """A delta, in a block that begins with the first one."""
        opened = [] if self._open else [self._begin({"type": "text", "text": ""})]
        self._open = True
        return [*opened, _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})]

    def closing(self, said: Said) -> Events:
        """The end of the text, the calls, the reason and the usage."""
        events = self.piece("") if not self._open and not said.calls else []
        if self._open:
            events.append(_event("content_block_stop", index=0))
        for made in said.calls:
            delta = {"type": "input_json_delta", "partial_json": made["function"]["arguments"]}
            events.append(self._begin({**_use(made), "input": {}}))
            events.append(_event("content_block_delta", index=self._blocks - 1, delta=delta))
            events.append(_event("content_block_stop", index=self._blocks - 1))
        events.append(_event("message_delta", delta=_end(said), usage=_usage(said), **_edits_and_worth(said)))
        return [*events, _event("message_stop")]

    def failing(self, refusal: Refusal) -> Events:
        return [event(refusal.anthropic())]

    def _head(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "usage": usage}

    def _begin(self, block: dict[str, Any]) -> ServerSentEvent:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)


def _event(kind: str, **data: Any) -> ServerSentEvent:
    return event({"type": kind, **data})


def _use(made: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": made["id"], "name": made["function"]["name"]}


def _end(said: Said) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens"}[said.turn.finish_reason]
    reason = "tool_use" if said.calls else "stop_sequence" if said.stopped else reason
    return {"stop_reason": reason, "stop_sequence": said.stopped}


def _usage(said: Said) -> dict[str, Any]:
    prompt, cached, completion = said.turn.usage
    counts = {"input_tokens": prompt - cached, "output_tokens": completion, "cache_read_input_tokens": cached}
    return {**counts, "cache_creation_input_tokens": 0}


def _edits_and_worth(said: Said) -> dict[str, Any]:
    """What was cleared, and the guarantee."""
    applied = [] if said.cleared is None else [said.cleared]
    return {"context_management": {"applied_edits": applied}, "kamera": said.kamera}
