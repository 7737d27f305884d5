"""Chat content to token text: the processor's own template, cut where a window needs seams.

A window's sequence is ``prefix · chunk · chunk · … · question · tail``. The seams are found by
rendering the template with a marker in the user's place, so any template that keeps the user's
content in one piece works; one that does not is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kamera.errors import ModalityNotSupported, ProcessorRequired

_MARK = "KAMERAMARK"


@dataclass(frozen=True)
class Seams:
    """The template's text around what users say."""

    prefix: str  # system prompt and the opening of the user's turn
    tail: str  # end of the user's turn and the opening of the answer
    reopen: str  # end of an answer and the opening of the user's next turn


class PromptFormat:
    """Renders content with a processor's (or a bare tokenizer's) chat template."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        self.takes_images = getattr(processor, "image_processor", None) is not None
        self.takes_videos = getattr(processor, "video_processor", None) is not None
        self.has_template = bool(
            getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        )

    def seams(self, system: str | None) -> Seams:
        """Where a window under this system prompt begins, and how a question ends."""
        if not self.has_template:
            return Seams(system or "", "", "")
        opening = [] if system is None else [self._message("system", system)]
        once = self._render([*opening, self._message("user", _MARK)], generation=True)
        prefix, mark, tail = once.partition(_MARK)
        if not mark:
            raise ProcessorRequired(
                "the chat template drops the user's text: Kamera cannot find where a question goes; "
                "build chunks with chunk_from_tensors and pass token ids"
            )
        turns = [
            *opening,
            self._message("user", _MARK + "1"),
            self._message("assistant", _MARK + "2"),
            self._message("user", _MARK + "3"),
        ]
        dialogue = self._render(turns, generation=False)
        _, found, rest = dialogue.partition(_MARK + "2")
        reopen, closed, _ = rest.partition(_MARK + "3")
        return Seams(prefix, tail, reopen if found and closed else "")

    def content_text(self, items: Sequence[dict[str, Any]]) -> str:
        """Token text of one chunk's content, placeholders unexpanded.

        ``items`` are ``{"type": "text", "text": …}``, ``{"type": "image"}`` or ``{"type": "video"}``.
        """
        if not self.has_template:
            tokens = {
                "image": getattr(self.processor, "image_token", ""),
                "video": getattr(self.processor, "video_token", ""),
            }
            return "".join(i["text"] if i["type"] == "text" else tokens[i["type"]] for i in items)
        if all(i["type"] == "text" for i in items):
            return "".join(i["text"] for i in items)
        seams = self.seams(None)
        # A question always follows a chunk, and templates write media with text behind it otherwise
        # than media alone (LLaVA, SmolVLM): render what will stand there.
        content = [*items, {"type": "text", "text": _MARK}]
        whole = self._render([{"role": "user", "content": content}], generation=True)
        before, _, after = whole.partition(_MARK)
        pairs = zip(before, seams.prefix, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(seams.prefix))
        # whitespace may differ
        if seams.prefix[shared:].strip() or len(before) < shared or after != seams.tail:
            raise ModalityNotSupported(
                "the chat template does not keep a user's media and text in one piece: "
                "build the chunk with chunk_from_tensors"
            )
        return before[shared:]

    def _message(self, role: str, text: str) -> dict[str, Any]:
        if self.takes_images:
            return {"role": role, "content": [{"type": "text", "text": text}]}
        return {"role": role, "content": text}

    def _render(self, messages: list[dict[str, Any]], generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            rendered: str = self.processor.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation
            )
        except TemplateError as error:
            roles = [m["role"] for m in messages]
            raise ModalityNotSupported(
                f"the chat template refuses the roles {roles}: {error}; without a system role pass "
                "system=None and put the instructions into the first chunk"
            ) from None
        return rendered
