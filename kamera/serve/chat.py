"""``/v1/chat/completions``: OpenAI's chat, read and written."""

from __future__ import annotations

from typing import Any

from kamera.content import Fields, chat_format, chat_logprobs, chat_message, chat_tool, choose_tools, hint_of
from kamera.serve.dialect import HARMLESS, Asked, Dialect, Events, Said, common


class Chat(Dialect):
    """A chat completion."""

    prefix = "chatcmpl-"

    def __init__(self, body: Fields, session: str | None = None) -> None:
        options = body.take_object("stream_options", absent=True)
        self._with_usage = options.take("include_usage", bool, False)
        options.accept_only(include_obfuscation=False)
        options.finish()
        tokens = [body.count(name) for name in ("max_completion_tokens", "max_tokens")]
        asked = Asked(
            messages=[chat_message(m) for m in body.objects("messages", needed=True)],
            format=chat_format(body),
            max_tokens=tokens[1] if tokens[0] is None else tokens[0],
            top_k=body.count("top_k", 0),
            seed=body.count("seed", -(2**63), 2**63 - 1),
            stop=body.texts("stop", 16),
            logprobs=chat_logprobs(body),
            hint=hint_of(body),
            **choose_tools(body, [chat_tool(t) for t in body.objects("tools")], True),
            **common(body, session, 2),
        )
        body.accept_only(n=1, logit_bias={}, frequency_penalty=(0, 0.0), presence_penalty=(0, 0.0))
        body.accept_only(modalities=["text"])
        for harmless, kind in (("store", bool), ("metadata", dict), *HARMLESS):
            body.take(harmless, kind)
        super().__init__(body, asked)

    def whole_answer(self, said: Said) -> dict[str, Any]:
        text = said.content or (None if said.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        message |= {"tool_calls": [*said.calls]} if said.calls else {}
        reason = "tool_calls" if said.calls else said.turn.finish_reason
        noted = None if said.logprobs is None else {"content": said.logprobs, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": noted}
        prompt, cached, completion = said.turn.usage
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage |= {"total_tokens": prompt + completion, "prompt_tokens_details": {"cached_tokens": cached}}
        return {**self._head(""), "choices": [choice], "usage": usage, "kamera": said.kamera}

    def opening_events(self) -> Events:
        return [self._chunk({"role": "assistant", "content": ""})]

    def piece_events(self, text: str) -> Events:
        return [self._chunk({"content": text})]

    def closing_events(self, said: Said) -> Events:
        """Calls, the reason, and the usage if it was asked for."""
        whole = self.whole_answer(said)
        (choice,), usage, kamera = whole["choices"], whole["usage"], whole["kamera"]
        calls = [self._chunk({"tool_calls": [{"index": i, **c}]}) for i, c in enumerate(said.calls)]
        last = [self._chunk({}, choice["finish_reason"], choice["logprobs"], kamera=kamera)]
        last += [self._chunk(None, usage=usage, kamera=kamera)] if self._with_usage else []
        return [*calls, *last, "[DONE]"]

    def _head(self, of: str) -> dict[str, Any]:
        return {"id": self.id, "object": f"chat.completion{of}", "created": self.created, "model": self.model}

    def _chunk(
        self, delta: dict[str, Any] | None, reason: str | None = None, noted: Any = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": noted, "finish_reason": reason}
        return {**self._head(".chunk"), "choices": [] if delta is None else [choice], **more}
