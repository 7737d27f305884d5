"""Chat content to token text: the processor's own template, cut at the borders of a window.

A window's sequence is ``prefix · chunk · chunk · … · question · tail``. Rendering the template with a
marker for the user's content finds the borders, so any template that keeps the user's content in one
piece works; others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kamera.content.items import Turn, check_role, items_of, make_turns, strings_in
from kamera.content.prefix import common_prefix
from kamera.content.template import ChatTemplate, missing_text_error
from kamera.errors import ModalityNotSupported, RoleNotSupported, UnsafeText, quote

_MARK = "KAMERAMARK"
_START = "KAMERASTART"
_SOMETHING = "KAMERATEXT"


class PromptText(NamedTuple):
    """Rendered text; ``word`` replaces each of ``hidden``, texts that spell special tokens."""

    text: str
    word: str = ""
    hidden: tuple[str, ...] = ()


class PromptFormat(ChatTemplate):
    """A chat template that writes the parts of a window: its beginning, chunks and questions."""

    def __init__(self, processor: Any, media: Sequence[int] = ()) -> None:
        super().__init__(processor, media)
        self._unnumbered: set[tuple[tuple[str, ...], ...]] = set()

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

    def chunk(self, turns: Sequence[Turn]) -> PromptText:
        """A chunk, which begins and ends within a window's open user turn.

        Raises RoleNotSupported for a role that the template lacks, as all here, and ModalityNotSupported for
        a template that writes it otherwise behind others: a chunk has no number.
        """
        bare = self._is_bare(turns, "user")
        text = self._guard(turns, self._turn_text if bare else self._dialogue_text)
        if self.has_template and (
            not bare or any("text" not in item for turn in turns for item in items_of(turn))
        ):
            self._check_number(turns)
        return text

    def question(self, turns: Sequence[Turn], tail: str) -> PromptText:
        """A question within the user's open turn, up to the answer; ``tail`` follows one turn of the user."""
        bare = self._is_bare(turns, "user")
        return self._guard(turns, partial(self._turn_text, tail=tail) if bare else self._question_text)

    def opening(self, turns: Sequence[Turn]) -> PromptText:
        """The beginning of a window: a system prompt or messages, then the opening of the user's turn."""
        bare = self._is_bare(turns, "system")
        return self._guard(turns, self._opening_text if self.has_template or not bare else self._turn_text)

    def token_ids(self, written: PromptText, *, special: bool = False) -> torch.Tensor:
        """Token ids, int64 ``[tokens]``; ``special`` lets the tokenizer add its BOS."""
        ids = torch.tensor(self.ids(written.text, special=special), dtype=torch.int64)
        return self.plain.splice(ids, written.word, written.hidden, {})[0] if written.hidden else ids

    # -- inside --------------------------------------------------------------------------------

    def _guard(self, turns: Sequence[Turn], render: Callable[[list[Turn]], str]) -> PromptText:
        """``turns`` rendered; if texts spell a special token, alone or joined, one replaces each text."""
        for turn in map(self._shape_calls, turns):
            rest = {name: value for name, value in turn.items() if name not in ("role", "content")}
            rest |= {n: item[n] for item in items_of(turn) for n in self.entries & item.keys()}
            if not all(map(self.plain.is_plain, strings_in(rest))):
                raise UnsafeText(
                    f"{', '.join(map(str, rest))[:80]} of a {turn['role']} message spells a special token: "
                    "take it out"
                )
        parts = [item.get("text") for turn in turns for item in items_of(turn)]
        texts = tuple(text for text in parts if text)
        if self.plain.is_plain("".join(texts)):
            return PromptText(render(list(turns)))
        word = self.plain.unused_special_token(render([_with_text(turn, _SOMETHING) for turn in turns]))
        return PromptText(render([_with_text(turn, word) for turn in turns]), word, texts)

    def _turn_text(self, turns: list[Turn], tail: str = "") -> str:
        return self.content_text([item for turn in turns for item in items_of(turn)]) + tail

    def _dialogue_text(self, turns: list[Turn]) -> str:
        # A question always follows a chunk, and templates render media before text differently from
        # media alone (LLaVA, SmolVLM): render both.
        text, rest = self._from_open_turn(_with_mark(turns, _MARK), last=_MARK)
        if rest != self.seams(None).tail:
            raise _split_error()
        return text

    def _question_text(self, turns: list[Turn]) -> str:
        return self._from_open_turn(turns)[0]

    def _opening_text(self, turns: list[Turn]) -> str:
        whole = self.render(_with_mark(turns, _MARK), generation=True)
        text, mark, _ = whole.partition(_MARK)
        if not mark:
            raise missing_text_error()
        return text

    def _from_open_turn(self, turns: list[Turn], last: str = "") -> tuple[str, str]:
        """The text of ``turns`` from within an open user turn up to ``last``, and the text after it."""
        is_open = turns[0]["role"] == "user"
        whole = self.render(turns if is_open else [*make_turns("user", _START), *turns], generation=True)
        head, _, rest = whole.partition(last) if last else (whole, "", "")
        if is_open:
            return self._behind_prefix(head), rest
        _, mark, text = head.partition(_START)
        if not mark:
            raise missing_text_error()
        return text, rest

    def _behind_prefix(self, rendered: str) -> str:
        """``rendered`` without the window's prefix, with which it begins."""
        prefix = self.seams(None).prefix
        length = common_prefix(rendered, prefix)
        if prefix[length:].strip():  # whitespace may differ
            raise _split_error()
        return rendered[length:]

    def _is_bare(self, turns: Sequence[Turn], role: str) -> bool:
        """True if the turns are one message of this role with content alone.

        Raises RoleNotSupported for roles that the template lacks.
        """
        if all(turn == {"role": role, "content": turn.get("content")} for turn in turns) and len(turns) < 2:
            return True
        roles = [check_role(turn["role"]) for turn in turns]
        if not self.has_template:
            raise RoleNotSupported(
                f"no chat template writes the roles {quote(roles)}: give their text as content"
            )
        for role in dict.fromkeys(roles):
            if role not in ("user", "system"):
                self._check_kept(role)
        if any(turn.get("tool_calls") for turn in turns):
            self.check([*(make_turns("user", _START) if roles[0] != "user" else []), *turns])
        return False

    def _check_number(self, turns: Sequence[Turn]) -> None:
        """Refuse a template whose text of the turns depends on what is before them: numbers of pictures, say.

        Asks once for turns of these roles and kinds of items.
        """
        shape = tuple((turn["role"], *[item["type"] for item in items_of(turn)]) for turn in turns)
        if shape in self._unnumbered:
            return
        kinds = dict.fromkeys(i["type"] for turn in turns for i in items_of(turn) if i["type"] != "text")
        media: list[dict[str, Any]] = [{"type": kind, kind: ""} for kind in kinds]
        text, mark = ([{"type": "text", "text": word}] for word in (_SOMETHING, _MARK))
        asked, seen = ({"role": "user", "content": content} for content in (text, media + text))
        answer, marked = ({"role": "assistant", "content": word} for word in (_SOMETHING, _MARK))
        is_open = turns[0]["role"] == "user"
        opened: list[Turn] = [*turns] if is_open else [asked, *turns]
        groups: list[list[list[Turn]]] = [
            [[asked, marked, *opened], [seen, marked, *opened], [asked, answer, asked, marked, *opened]]
        ]
        if is_open:
            first, *rest = opened
            contents = [[*before, *mark, *items_of(first)] for before in (text, media + text)]
            groups.append([[{**first, "content": content}, *rest] for content in contents])
        for group in groups:
            try:
                pieces = [self.render(one, generation=False).partition(_MARK) for one in group]
            except RoleNotSupported:
                continue  # the template refuses this probe
            for _, found, other in pieces:
                if found and other != pieces[0][2]:
                    at = other.rfind("\n", 0, common_prefix(other, pieces[0][2])) + 1
                    one, other = (quote(piece[at : at + 24]) for piece in (pieces[0][2], other))
                    raise ModalityNotSupported(
                        f"the chat template writes {one}, and {other} behind others: a chunk of a window has "
                        "no number; use ChatSession, or build the chunk with chunk_from_tensors"
                    )
        self._unnumbered.add(shape)

    def _check_kept(self, role: str) -> None:
        """Refuse a template that drops the role's text or renders it as the user's."""

        def render_as(by: str) -> str:
            return self.render([*make_turns("user", "a"), *make_turns(by, _MARK)], generation=False)

        try:
            text = render_as(role)
        except RoleNotSupported:
            return  # the template refuses this probe: the message itself decides
        try:
            same = text == render_as("user")
        except RoleNotSupported:
            same = False
        if same or _MARK not in text:
            raise RoleNotSupported(
                f"the chat template does not write role {quote(role)}: give the text as a user's, or "
                "token ids"
            )


def _split_error() -> ModalityNotSupported:
    return ModalityNotSupported(
        "the chat template does not keep a user's media and text in one piece: build the chunk with "
        "chunk_from_tensors"
    )


def _with_text(turn: Turn, word: str) -> Turn:
    """The turn with ``word`` for each of its texts."""
    content = turn["content"]
    if isinstance(content, str):
        return {**turn, "content": word if content else ""}
    return {**turn, "content": [{**i, "text": word} if i.get("text") else i for i in content]}


def _with_mark(turns: Sequence[Turn], mark: str) -> list[Turn]:
    """``turns`` with ``mark`` at the end of the user's turn."""
    if not turns or turns[-1]["role"] != "user":
        return [*turns, {"role": "user", "content": mark}]
    content = turns[-1]["content"]
    more = content + mark if isinstance(content, str) else [*content, {"type": "text", "text": mark}]
    return [*turns[:-1], {**turns[-1], "content": more}]
