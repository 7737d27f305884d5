"""``/v1/messages``: Anthropic's messages, read and written."""

from __future__ import annotations

import json
from typing import Any

from kamera.content import Fields, anthropic_format, anthropic_messages, anthropic_tools, content_of
from kamera.edits import clearing_of
from kamera.errors import InvalidRequest
from kamera.serve.dialect import Asked, Dialect, Events, Said, common
from kamera.serve.refusal import Refusal


class Messages(Dialect):
    """A message; with ``counts`` a request whose tokens are only counted."""

    prefix = "msg_"

    def __init__(self, body: Fields, session: str | None = None, *, counts: bool = False) -> None:
        system: list[dict[str, Any]] = []
        if "system" in body:
            system = [{"role": "system", "content": content_of(body, "system", pictures=False, joined=True)}]
        messages = [made for m in body.objects("messages", needed=True) for made in anthropic_messages(m)]
        user = body.take_object("metadata", absent=True)
        asked = Asked(
            messages=[*system, *messages],
            format=anthropic_format(body),
            max_tokens=body.count("max_tokens"),
            top_k=body.count("top_k", 0),
            stop=body.texts("stop_sequences", 16),
            hint=user.take("user_id", str, ""),
            clearing=clearing_of(body.take_object("context_management", absent=True)),
            **anthropic_tools(body),
            **common(body, session, 1),
        )
        user.finish()
        body.accept_only(thinking={"type": "disabled"}, service_tier=("auto", "standard_only"))
        super().__init__(body, asked)
        if asked.max_tokens is None and not counts:
            raise InvalidRequest("max_tokens is missing: give a whole number", "max_tokens")
        self._blocks = 0
        self._open = False  # the text, which is the first block

    def whole_answer(self, said: Said) -> dict[str, Any]:
        blocks = [{"type": "text", "text": said.content}] if said.content or not said.calls else []
        for made in said.calls:
            use = {"type": "tool_use", "id": made["id"], "name": made["function"]["name"]}
            blocks.append({**use, "input": json.loads(made["function"]["arguments"])})
        prompt, cached, completion = said.turn.usage
        usage = {"input_tokens": prompt - cached, "output_tokens": completion}
        usage |= {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
        reason = {"stop": "end_turn", "length": "max_tokens"}[said.turn.finish_reason]
        reason = "tool_use" if said.calls else "stop_sequence" if said.stopped else reason
        end = {"stop_reason": reason, "stop_sequence": said.stopped}
        edits = {"applied_edits": [] if said.cleared is None else [said.cleared]}
        whole = {**self._head(blocks, usage), **end}
        return {**whole, "context_management": edits, "kamera": said.kamera}

    def opening_events(self) -> Events:
        """The message without content; its usage comes at the end."""
        head = self._head([], {"input_tokens": 0, "output_tokens": 0})
        return [{"type": "message_start", "message": {**head, "stop_reason": None, "stop_sequence": None}}]

    def piece_events(self, text: str) -> Events:
        """A delta, in a block that begins with the first one."""
        opened = [] if self._open else [self._begin({"type": "text", "text": ""})]
        self._open = True
        return [*opened, self._block("delta", delta={"type": "text_delta", "text": text})]

    def closing_events(self, said: Said) -> Events:
        """The end of the text, the calls, the reason and the usage."""
        events = self.piece_events("") if not self._open and not said.calls else []
        if self._open:
            events.append(self._block("stop"))
        whole = self.whole_answer(said)
        uses = (block for block in whole["content"] if block["type"] == "tool_use")
        for use, made in zip(uses, said.calls, strict=True):
            delta = {"type": "input_json_delta", "partial_json": made["function"]["arguments"]}
            events.append(self._begin({**use, "input": {}}))
            events += [self._block("delta", delta=delta), self._block("stop")]
        last = {name: whole[name] for name in ("usage", "context_management", "kamera")}
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [*events, {"type": "message_delta", "delta": delta, **last}, {"type": "message_stop"}]

    def error_events(self, refusal: Refusal) -> Events:
        return [refusal.anthropic()]

    def _head(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "usage": usage}

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks += 1
        return self._block("start", content_block=block)

    def _block(self, kind: str, **data: Any) -> dict[str, Any]:
        """An event of the last block."""
        return {"type": f"content_block_{kind}", "index": self._blocks - 1, **data}
