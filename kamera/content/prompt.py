"""Chat content to token text: the processor's own template, cut at the borders of a window.

A window's sequence is ``prefix · chunk · chunk · … · question · tail``. Rendering the template with a
marker for the user's content finds the borders, so any template that keeps the user's content in one
piece works; others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from kamera.content.exclusive import exclusive_of
from kamera.content.plain import PlainText
from kamera.content.turns import Turn, check_role, strings_in
from kamera.content.vanishing import Vanishing, name_of
from kamera.errors import (
    KameraError,
    ModalityNotSupported,
    ProcessorRequired,
    RoleNotSupported,
    UnsafeText,
    first_line,
    quote,
)

_MARK = "KAMERAMARK"
_START = "KAMERASTART"
_SOMETHING = "KAMERATEXT"


@dataclass(frozen=True)
class Seams:
    """The template's text around the user's content."""

    prefix: str  # system prompt and the opening of the user's turn
    tail: str  # end of the user's turn and the opening of the answer
    reopen: str  # end of an answer and the opening of the user's next turn


class PromptText(NamedTuple):
    """Rendered text; ``word`` replaces each of ``hidden``, texts that spell special tokens."""

    text: str
    word: str = ""
    hidden: tuple[str, ...] = ()


class PromptFormat:
    """Renders content with a processor's (or a bare tokenizer's) chat template.

    ``media`` are the ids of picture and clip placeholders. User content is text: special tokens count in
    the template's own words only (`PlainText`).
    """

    def __init__(self, processor: Any, media: Sequence[int | None] = ()) -> None:
        self.processor = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        # a fast tokenizer called by two threads at once raises "Already borrowed"
        self.exclusive = exclusive_of(self.tokenizer)
        self.takes_images = getattr(processor, "image_processor", None) is not None
        self.takes_videos = getattr(processor, "video_processor", None) is not None
        self.has_template = bool(
            getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        )
        self._vanishing = Vanishing(name_of(processor), self._whole)
        self.plain = PlainText(self.tokenizer, media, self._wrapping)

    def seams(self, system: str | None) -> Seams:
        """The beginning of a window under this system prompt, and the end of a question."""
        if not self.has_template:
            return Seams(system or "", "", "")
        opening = [] if system is None else [self._message("system", system)]
        once = self._render([*opening, self._message("user", _MARK)], generation=True)
        prefix, mark, tail = once.partition(_MARK)
        if not mark:
            raise _dropped()
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
        return self._dialogue_text([{"role": "user", "content": list(items)}])

    # -- text for token ids --------------------------------------------------------------------

    def content(self, items: Sequence[dict[str, Any]]) -> PromptText:
        """Content of a chunk; ``items`` as in `content_text`."""
        return self._guard([{"role": "user", "content": list(items)}], self._turn_text)

    def dialogue(self, turns: Sequence[Turn]) -> PromptText:
        """Messages as a chunk, which begins and ends within a window's open user turn.

        Raises RoleNotSupported for a role that the template lacks.
        """
        self._check(turns)
        return self._guard(turns, self._dialogue_text)

    def question(self, asked: str | Sequence[Turn], tail: str) -> PromptText:
        """A question within the user's open turn, up to the answer. ``tail`` follows a question of text."""
        if isinstance(asked, str):
            turn = [{"role": "user", "content": [{"type": "text", "text": asked}]}]
            return self._guard(turn, partial(self._turn_text, tail=tail))
        self._check(asked)
        if [turn["role"] for turn in asked] == ["user"]:
            return self._guard(asked, partial(self._turn_text, tail=tail))
        return self._guard(asked, self._question_text)

    def opening(self, system: str | Sequence[Turn] | None) -> PromptText:
        """The beginning of a window: a system prompt or messages, then the opening of the user's turn."""
        if system is None:
            return PromptText(self.seams(None).prefix)
        if isinstance(system, str):
            turn = [{"role": "system", "content": [{"type": "text", "text": system}]}]
            return self._guard(turn, self._prefix_text)
        self._check(system)
        return self._guard(system, self._opening_text)

    def ids(self, written: PromptText, *, special: bool = False) -> torch.Tensor:
        """Token ids, int64 ``[tokens]``; ``special`` lets the tokenizer add its BOS."""
        ids = torch.tensor(self.plain.tokens(written.text, add_special_tokens=special), dtype=torch.int64)
        return self.plain.spliced(ids, written.word, written.hidden, {})[0] if written.hidden else ids

    # -- inside --------------------------------------------------------------------------------

    def _guard(self, turns: Sequence[Turn], render: Callable[[list[Turn]], str]) -> PromptText:
        """``turns`` rendered; if texts spell a special token, alone or joined, one replaces each text."""
        for turn in turns:
            rest = {name: value for name, value in turn.items() if name not in ("role", "content")}
            if not all(map(self.plain.is_plain, strings_in(rest))):
                raise UnsafeText(
                    f"{', '.join(map(str, rest))[:80]} of a {turn['role']} message spells a special token: "
                    "take it out"
                )
        found = [item.get("text") for turn in turns for item in turn["content"]]
        texts = tuple(text for text in found if text)
        if self.plain.is_plain("".join(texts)):
            return PromptText(render(list(turns)))
        word = self.plain.stand_in(render([_with_text(turn, _SOMETHING) for turn in turns]))
        return PromptText(render([_with_text(turn, word) for turn in turns]), word, texts)

    def _turn_text(self, turns: list[Turn], tail: str = "") -> str:
        return self.content_text(turns[0]["content"]) + tail

    def _prefix_text(self, turns: list[Turn]) -> str:
        return self.seams(self._turn_text(turns)).prefix

    def _dialogue_text(self, turns: list[Turn]) -> str:
        # A question always follows a chunk, and templates render media before text differently from
        # media alone (LLaVA, SmolVLM): render both.
        text, after = self._from_open_turn(_with_mark(turns, _MARK), last=_MARK)
        if after != self.seams(None).tail:
            raise _torn()
        return text

    def _question_text(self, turns: list[Turn]) -> str:
        return self._from_open_turn(turns)[0]

    def _opening_text(self, turns: list[Turn]) -> str:
        whole = self._render(self._adapt(_with_mark(turns, _MARK)), generation=True)
        before, found, _ = whole.partition(_MARK)
        if not found:
            raise _dropped()
        return before

    def _from_open_turn(self, turns: list[Turn], last: str = "") -> tuple[str, str]:
        """The text of ``turns`` from within an open user turn up to ``last``, and the text after it."""
        is_open = turns[0]["role"] == "user"
        opened: list[Turn] = turns if is_open else [{"role": "user", "content": [_text(_START)]}, *turns]
        whole = self._render(self._adapt(opened), generation=True)
        before, _, after = whole.partition(last) if last else (whole, "", "")
        if is_open:
            return self._behind_prefix(before), after
        _, found, text = before.partition(_START)
        if not found:
            raise _dropped()
        return text, after

    def _behind_prefix(self, rendered: str) -> str:
        """``rendered`` without the window's prefix, with which it begins."""
        prefix = self.seams(None).prefix
        pairs = zip(rendered, prefix, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(prefix))
        # whitespace may differ
        if prefix[shared:].strip() or len(rendered) < shared:
            raise _torn()
        return rendered[shared:]

    def _check(self, turns: Sequence[Turn]) -> None:
        roles = [check_role(turn["role"]) for turn in turns]
        if not self.has_template:
            raise RoleNotSupported(
                f"no chat template writes the roles {quote(roles)}: give their text as content"
            )
        for role in dict.fromkeys(roles):
            if role not in ("user", "system"):
                self._check_kept(role)
        if any(turn.get("tool_calls") for turn in turns):
            opened: list[Turn] = [{"role": "user", "content": [_text(_START)]}]
            self._vanishing.check([*(opened if roles[0] != "user" else []), *turns])

    def _check_kept(self, role: str) -> None:
        """Refuse a template that drops the role's text or renders it as the user's."""
        opened: Turn = {"role": "user", "content": [_text("a")]}

        def rendered(by: str) -> str:
            turns = [opened, {"role": by, "content": [_text(_MARK)]}]
            return self._whole(turns)

        try:
            written = rendered(role)
        except RoleNotSupported:
            return  # the template refuses this probe: the message itself decides
        try:
            same = written == rendered("user")
        except RoleNotSupported:
            same = False
        if same or _MARK not in written:
            raise RoleNotSupported(
                f"the chat template does not write role {quote(role)}: give the text as a user's, or "
                "token ids"
            )

    def _adapt(self, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Turns in this template's form: content is a list of items if it takes pictures."""
        if self.takes_images:
            return [dict(turn) for turn in turns]
        return [{**turn, "content": "".join(i["text"] for i in turn["content"])} for turn in turns]

    def _wrapping(self) -> str:
        try:
            seams = self.seams(None)
        except KameraError:
            return ""  # a template that Kamera cannot cut is refused at its first use
        return seams.prefix + seams.tail + seams.reopen

    def _message(self, role: str, text: str) -> dict[str, Any]:
        if self.takes_images:
            return {"role": role, "content": [{"type": "text", "text": text}]}
        return {"role": role, "content": text}

    def _whole(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """Turns as a template without tools shows them."""
        return self._render(self._adapt(turns), generation=False)

    def _render(self, messages: list[dict[str, Any]], generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            rendered: str = self.processor.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation
            )
        except TemplateError as error:
            roles = [m["role"] for m in messages]
            raise RoleNotSupported(
                f"the chat template refuses the roles {quote(roles)}: {first_line(error)}; without a system "
                "role pass system=None and put the instructions into the first chunk"
            ) from None
        return rendered


def _torn() -> ModalityNotSupported:
    return ModalityNotSupported(
        "the chat template does not keep a user's media and text in one piece: build the chunk with "
        "chunk_from_tensors"
    )


def _dropped() -> ProcessorRequired:
    return ProcessorRequired(
        "the chat template drops the user's text: Kamera cannot find where chunks and questions go; build "
        "chunks with chunk_from_tensors and pass token ids"
    )


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _with_text(turn: Turn, word: str) -> Turn:
    """The turn with ``word`` for each of its texts."""
    content = [{**i, "text": word} if i.get("text") else i for i in turn["content"]]
    return {**turn, "content": content}


def _with_mark(turns: Sequence[Turn], mark: str) -> list[Turn]:
    """``turns`` with ``mark`` at the end of the user's turn."""
    *before, last = turns
    if last["role"] != "user":
        return [*turns, {"role": "user", "content": [_text(mark)]}]
    return [*before, {**last, "content": [*last["content"], _text(mark)]}]
