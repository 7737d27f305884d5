"""A chat template: rendered whole, and probed for the tokens that open turns, wrap media and frame texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from PIL import Image

from kamera.content.arguments import Arguments
from kamera.content.exclusive import exclusive_of
from kamera.content.items import is_picture, kind_of, media_item, no_item_message, strings_in
from kamera.content.plain import PlainText
from kamera.content.vanishing import Vanishing
from kamera.content.video import Clip, processor_media
from kamera.errors import (
    KameraError,
    ModalityNotSupported,
    ProcessorRequired,
    RoleNotSupported,
    UnreadableMedia,
    UnsafeText,
    first_line,
    quote,
)
from kamera.forks import lazy

Message = Mapping[str, Any]
"""A chat message: ``role``, ``content`` (text or a list of items), ``tool_calls``, …"""

_MARK = "KAMERAMARK"
_TURNS = ("user", "assistant", "user")
_SHORT = 4096
"""Characters of a text that is remembered to spell no special token."""


@dataclass(frozen=True)
class Seams:
    """The template's text around the user's content."""

    prefix: str  # system prompt and the opening of the user's turn
    tail: str  # end of the user's turn and the opening of the answer
    reopen: str  # end of an answer and the opening of the user's next turn


class ChatTemplate:
    """The chat template of a processor, or of a bare tokenizer.

    ``kinds`` are the media that the processor takes, ``media`` ids of their placeholders besides its own.
    Text of messages is text: special tokens count in the template's own words only (`PlainText`).
    """

    def __init__(self, processor: Any, media: Sequence[int] = ()) -> None:
        self.processor = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        parts = {"image": "image_processor", "video": "video_processor"}
        self.kinds = tuple(k for k, part in parts.items() if getattr(processor, part, None) is not None)
        # a fast tokenizer called by two threads at once raises "Already borrowed"
        self.exclusive = exclusive_of(self.tokenizer)
        own = [str(getattr(processor, f"{kind}_token", None) or "") for kind in self.kinds]
        media = [*media, *map(self.tokenizer.convert_tokens_to_ids, own)]
        self.plain = PlainText(self.tokenizer, media, self._wrapping)
        self._is_plain = lru_cache(1024)(self.plain.is_plain)  # a history comes again each turn
        self.wrapper, self.frame = cache(self._wrapper), cache(self._turn_wrapper)
        self.placeholder_id = cache(self._placeholder_id)
        self.has_template = bool(
            getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        )
        name = getattr(self.tokenizer, "name_or_path", "") or type(processor).__name__
        self._vanishing = Vanishing(name, self.render)

    def check(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Return the media items of messages, after a check that the template shows all of the messages.

        Raises ModalityNotSupported for tools, tool calls or roles that it leaves out, and for media of a kind
        that the processor lacks.
        """
        items = media_items(messages)
        for kind in dict.fromkeys(item["type"] for item in items):
            if kind not in self.kinds:
                raise ModalityNotSupported(
                    f"{type(self.processor).__name__} takes {' and '.join(('text', *self.kinds))} only, a "
                    f"message holds {kind}: {self.lacks([kind]) or 'leave it out, or use another backbone'}"
                )
        self._vanishing.check(messages, tools)
        return items

    def lacks(self, kinds: Sequence[str]) -> str:
        """Why the processor does not take media of these kinds, where it was loaded without a part."""
        reasons: Mapping[str, str] = getattr(self.processor, "lacks", {})
        return "; ".join(dict.fromkeys(reasons[kind] for kind in kinds if kind in reasons))

    def check_text(self, messages: Sequence[Message]) -> None:
        """Raise UnsafeText for a message whose text spells a special token: it could open a turn."""
        for message in map(self._shape_calls, messages):
            content = message.get("content")
            items = content if isinstance(content, list | tuple) else [{"text": content}]
            values = [item.get("text") for item in items if isinstance(item, Mapping)]
            values += [value for name, value in message.items() if name != "content"]
            texts = [value for value in values if isinstance(value, str)]
            objects = [value for value in values if not (value is None or isinstance(value, str))]
            for text in [*texts, *(strings_in(objects) if objects else ())]:
                if not (self._is_plain(text) if len(text) <= _SHORT else self.plain.is_plain(text)):
                    raise UnsafeText(
                        f"the text {quote(text)} of a {quote(message.get('role'))} message spells a special "
                        "token: take it out"
                    )

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, generation: bool
    ) -> str:
        """The conversation as text, media as placeholders.

        Raises RoleNotSupported for messages that the template refuses, ProcessorRequired without a template.
        """
        outlines = [self._without_media(self._shape_calls(message)) for message in messages]
        return self._apply(outlines, tools, generation)

    def _shape_calls(self, message: Message) -> Message:
        """A message with the arguments of its tool calls in the form that the template writes."""
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [*map(self._arguments.of_call, calls)]} if calls else message

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, generation: bool) -> str:
        from jinja2 import TemplateError

        if not self.has_template:
            raise ProcessorRequired(
                f"{type(self.processor).__name__} has no chat template: set one, or build chunks from text"
            )
        options: dict[str, Any] = {"tokenize": False, **({"tools": list(tools)} if tools else {})}
        try:
            apply = self.processor.apply_chat_template
            return str(apply(list(messages), add_generation_prompt=generation, **options))
        except (TemplateError, KeyError, TypeError) as error:
            roles = [m.get("role") for m in messages]
            raise RoleNotSupported(
                f"the chat template refuses the roles {quote(roles)}: {first_line(error)}; change the "
                "messages, or the template (one without a system role: pass system=None, and put the "
                "instructions into the first chunk)"
            ) from None

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a rendered prompt, equal to those of transformers for this processor."""
        bos = self.tokenizer.bos_token
        bare = self.processor is self.tokenizer  # a tokenizer's own apply_chat_template adds nothing
        special = not bare and not (bos is not None and text.startswith(bos))
        return self.ids(text, special=special)

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of trusted text; ``special`` lets the tokenizer add its own."""
        return self.plain.tokens(text, add_special_tokens=special)

    def process(
        self, text: str, images: Sequence[Image.Image], clips: Sequence[Clip], *, special: bool = False
    ) -> dict[str, Any]:
        """What one call of the processor makes of a text with placeholders and its media.

        ``special`` as for `ids`. Raises UnreadableMedia for media that it refuses, ModalityNotSupported.
        """
        media = processor_media(images, clips)
        try:
            with self.exclusive:
                outputs = self.processor(text=[text], add_special_tokens=special, **media)
        except ImportError as error:
            raise ModalityNotSupported(f"the processor needs a package for {quote(text)}: {error}") from None
        except KameraError:
            raise
        except ValueError as error:
            raise UnreadableMedia(f"the processor refuses {quote(text)}: {first_line(error)}") from error
        return dict(outputs)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        with self.exclusive:
            return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    @lazy
    def opener(self) -> int | None:
        """The special token that opens a turn; None if the template has none."""
        messages = [{"role": "user", "content": _MARK}]
        rest = self.render(messages, generation=True)
        whole = self.render(messages, generation=False)
        added = rest[len(whole) :] if rest.startswith(whole) else ""
        if not added:
            return None
        first = self.ids(added)[0]
        return first if first in set(self.tokenizer.all_special_ids) | set(self._special_ids()) else None

    def seams(self, system: str | None) -> Seams:
        """The beginning of a window under this system prompt, the end of a question, and of an answer."""
        if not self.has_template:
            return Seams(system or "", "", "")
        first, answer, next_ = ({"role": r, "content": _MARK + n} for r, n in zip(_TURNS, "123", strict=True))
        opening = [] if system is None else [{"role": "system", "content": system}]
        whole = self.render([*opening, {"role": "user", "content": _MARK}], generation=True)
        prefix, mark, tail = whole.partition(_MARK)
        if not mark:
            raise missing_text_error()
        dialogue = self.render([*opening, first, answer, next_], generation=False)
        _, answer_mark, rest = dialogue.partition(answer["content"])
        reopen, next_mark, _ = rest.partition(next_["content"])
        return Seams(prefix, tail, reopen if answer_mark and next_mark else "")

    def _wrapping(self) -> str:
        """What is written around a user's message."""
        try:
            seams = self.seams(None)
        except KameraError:
            return ""  # a template that Kamera cannot cut is refused at its first use
        return seams.prefix + seams.tail + seams.reopen

    def _wrapper(self, kind: str) -> tuple[list[int], list[int]]:
        """Token ids that the template writes before and after a picture's (clip's) placeholder."""
        items = [{"type": "text", "text": _MARK}, {"type": kind}, {"type": "text", "text": _MARK}]
        text = self.render([{"role": "user", "content": items}], generation=False)
        _, _, rest = text.partition(_MARK)
        middle, mark, _ = rest.partition(_MARK)
        placeholder = self.placeholder(kind)
        prefix, hit, suffix = middle.partition(placeholder)
        if not mark or not hit:
            return [], []
        return self.ids(prefix), self.ids(suffix)

    def _turn_wrapper(self, role: str) -> tuple[list[int], list[int]]:
        """Token ids that open a turn of ``role`` and close it; empty if ``role`` is not a turn."""
        opening = [] if role == "user" else [{"role": "user", "content": "x"}]
        try:
            text = self.render([*opening, {"role": role, "content": _MARK}], generation=False)
        except ModalityNotSupported:
            return [], []
        head, mark, rest = text.partition(_MARK)
        ids = self.ids(head)
        if not mark or self.opener is None or self.opener not in ids:
            return [], []
        last = len(ids) - 1 - ids[::-1].index(self.opener)
        return ids[last:], self.ids(rest)

    def placeholder(self, kind: str) -> str:
        """The text of a picture's (clip's) placeholder. Raises ModalityNotSupported if there is none."""
        token = getattr(self.processor, f"{kind}_token", None)
        if not token:
            raise ModalityNotSupported(f"{type(self.processor).__name__} takes no {kind}: leave it out")
        return str(token)

    def _placeholder_id(self, kind: str) -> int:
        ids = self.ids(self.placeholder(kind))
        if len(ids) != 1:
            raise ModalityNotSupported(
                f"the tokenizer has no one token for a {kind}'s placeholder: add it as a special token"
            )
        return ids[0]

    @lazy
    def _arguments(self) -> Arguments:
        def render(messages: Sequence[Message]) -> str:
            return self._apply([self._without_media(message) for message in messages], None, False)

        return Arguments.of(render)

    def _without_media(self, message: Message) -> dict[str, Any]:
        """A message with placeholders for media items, in the template's form of content."""
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            items = [_item_without_media(item) for item in content]
            if not self.kinds:
                return {**message, "content": "".join(i["text"] for i in items)}
            return {**message, "content": items}
        if isinstance(content, str) and self.kinds:
            return {**message, "content": [{"type": "text", "text": content}]}
        return dict(message)

    def _special_ids(self) -> list[int]:
        decoder: Mapping[int, Any] = getattr(self.tokenizer, "added_tokens_decoder", {})
        return [i for i, token in decoder.items() if token.special]


def missing_text_error() -> ProcessorRequired:
    """The error for a template that leaves out what the user says."""
    return ProcessorRequired(
        "the chat template drops the user's text: Kamera cannot find where chunks and questions go; build "
        "chunks with chunk_from_tensors and pass token ids"
    )


def media_items(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The picture and video items of a conversation, in order, each as `kamera.content.items.media_item`."""
    items = []
    for message in messages:
        content = message.get("content")
        if is_picture(content):
            raise ModalityNotSupported(
                f"the content of a {quote(message.get('role'))} message is a picture: give a list of items, "
                '[{"type": "image", "image": …}]'
            )
        if isinstance(content, Sequence) and not isinstance(content, str):
            for item in content:
                kind = _kind(item)
                if kind != "text":
                    items.append(media_item(item, kind))
    return items


def copy_message(message: Message) -> dict[str, Any]:
    """A copy of a message, of its dicts and lists down to the media, which are not copied."""
    return {name: _copy(value) for name, value in message.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(inner) for inner in value]
    return value


def check_messages(messages: Sequence[Any]) -> None:
    """Raise `ValueError` for a message that is no mapping with a role; it names the message."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} is {quote(message)}: give a dict with a role and content")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(
                f"message {number} has the role {quote(message.get('role'))}: give user, assistant, …"
            )


def tool_schema(tool: Any) -> dict[str, Any]:
    """A tool as JSON; a function becomes the schema that transformers derives from it."""
    if isinstance(tool, Mapping):
        return dict(tool)
    from transformers.utils.chat_template_utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(tool)
    return schema


def _item_without_media(item: Any) -> dict[str, Any]:
    kind = _kind(item)
    return {"type": "text", "text": item["text"]} if kind == "text" else {"type": kind}


def _kind(item: Any) -> str:
    kind = kind_of(item)
    if kind is None:
        raise ModalityNotSupported(no_item_message(item))
    return kind
