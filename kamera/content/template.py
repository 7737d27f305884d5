"""A chat template: rendered whole, and probed for the tokens that open turns, wrap media and frame texts.

What a template leaves out without a word is found by rendering it twice: the model would answer another
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_not
from typing import Any

from PIL import Image

from kamera.content.borders import common_prefix
from kamera.content.items import (
    is_picture,
    kind_of,
    media_item,
    no_item_message,
    own_entries,
    strings_in,
    text_of,
)
from kamera.content.plain import PlainText, encode, hold_tokenizer
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

_OTHER = "KAMERAOTHER"


class Vanishing:
    """Looks for tools, tool calls and roles that a template does not write; asks once for each that it does.

    ``name`` is the template's in messages, ``render`` its `ChatTemplate.render`.
    """

    def __init__(self, name: str, render: Callable[..., str]) -> None:
        self._name = name
        self._render = render
        self._visible_parts: set[str] = set()

    def check(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """Raise ModalityNotSupported for a part of the conversation that the template leaves out.

        It does if the text without the part, or with another in its place, is the same. Raises it also for
        messages that the template refuses.
        """
        for part, others, other_tools in self._without(messages, tools):
            if part in self._visible_parts:
                continue
            whole = self._render(messages, tools=tools, generation=False)
            try:
                same = self._render(others, tools=other_tools, generation=False) == whole
            except ModalityNotSupported:
                same = False  # the template asks for it
            if same:
                raise ModalityNotSupported(
                    f"the chat template of {self._name} does not show {part}: leave them out, say it in "
                    "text, or give the processor a template that does"
                )
            self._visible_parts.add(part)

    def _without(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> Iterator[tuple[str, Sequence[Message], Sequence[Any] | None]]:
        """Parts that may vanish, each with the conversation without it."""
        if tools:
            yield "tools", messages, None
        if any(message.get("tool_calls") for message in messages):
            yield "tool calls", [_without_calls(message) for message in messages], tools
        for role in dict.fromkeys(str(message.get("role")) for message in messages):
            if role in ("user", "assistant"):
                continue
            others = [_with_other_text(m) if m.get("role") == role else m for m in messages]
            if any(map(is_not, others, messages)):
                yield f"messages of the role {quote(role)}", others, tools


def _without_calls(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _with_other_text(message: Message) -> Message:
    """The message with another text for its own; the message itself if it has none."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _OTHER} if content.strip() else message
    if isinstance(content, list | tuple) and any(map(_has_text, content)):
        return {**message, "content": [{**i, "text": _OTHER} if _has_text(i) else i for i in content]}
    return message


def _has_text(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("text"), str) and bool(item["text"].strip())


_MARK = "KAMERAMARK"
_TURNS = ("user", "assistant", "user")
_SOURCES = ("image", "video", "url", "path", "base64", "image_url", "video_url")


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
        own = [str(getattr(processor, f"{kind}_token", None) or "") for kind in self.kinds]
        media = [*media, *map(self.tokenizer.convert_tokens_to_ids, own)]
        self.plain = PlainText(self.tokenizer, media, self._wrapping)
        self.wrapper, self.frame = cache(self._wrapper), cache(self._frame)
        self.closing = cache(self._closing)
        self.placeholder_id = cache(self._placeholder_id)
        self.has_template = bool(
            getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        )
        self._name = getattr(self.tokenizer, "name_or_path", "") or type(processor).__name__
        self._vanishing = Vanishing(self._name, self.render)
        self.entries: set[str] = set()
        """Entries of picture and video items that the template reads, of those that Kamera does not know."""

    # -- messages ------------------------------------------------------------------------------

    def write(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as the template is given them: as they are, but for texts in a form that it drops.

        Arguments of calls get the form that it takes. Raises ModalityNotSupported for what is no item.
        """
        return [self._write(message) for message in messages]

    def apply(self, written: Sequence[Message], tools: Sequence[Any] | None, *, generation: bool) -> str:
        """The conversation of `write` as text, media as placeholders.

        Raises RoleNotSupported for messages that the template refuses, ProcessorRequired without a template.
        """
        from jinja2 import TemplateError

        if not self.has_template:
            raise ProcessorRequired(
                f"{type(self.processor).__name__} has no chat template: set one, or build chunks from text"
            )
        options: dict[str, Any] = {"tokenize": False, **({"tools": list(tools)} if tools else {})}
        try:
            apply = self.processor.apply_chat_template
            return str(apply(list(written), add_generation_prompt=generation, **options))
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            roles = [m.get("role") for m in written]
            raise RoleNotSupported(
                f"the chat template refuses the roles {quote(roles)}: {first_line(error)}; change the "
                "messages, or the template (one without a system role: pass system=None, and put the "
                "instructions into the first chunk)"
            ) from None

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, generation: bool
    ) -> str:
        """`write`, then `apply`."""
        return self.apply(self.write(messages), tools, generation=generation)

    def check(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """Check that the template shows all of the messages, and the processor takes their media.

        Raises ModalityNotSupported for tools, tool calls, roles or forms of text that it leaves out, and for
        media of a kind that the processor lacks.
        """
        for kind in dict.fromkeys(item["type"] for item in media_items(messages)):
            if kind not in self.kinds:
                raise ModalityNotSupported(
                    f"{type(self.processor).__name__} takes {' and '.join(('text', *self.kinds))} only, a "
                    f"message holds {kind}: {self.lacks([kind]) or 'leave it out, or use another backbone'}"
                )
        if self.kinds and self._text_form:
            self._check_form(messages)
        self._vanishing.check(messages, tools)
        self.read_entries(messages, tools)

    def _check_form(self, messages: Sequence[Message]) -> None:
        """Raise ModalityNotSupported for a text in a form that the template drops."""
        wrong, right = (
            ("string", "part of a list") if self._text_form == "parts" else ("part of a list", "string")
        )
        for message in messages:
            if isinstance(message.get("content"), str) == (wrong == "string") and text_of(message).strip():
                raise ModalityNotSupported(
                    f"the chat template of {self._name} does not show a text that is a {wrong}, and a "
                    f"{quote(message.get('role'))} message has one: give it as a {right}"
                )

    def read_entries(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """Learn which entries of items, of those that Kamera does not know, the template reads."""
        contents = [message.get("content") for message in messages]
        items = [item for content in contents if isinstance(content, list | tuple) for item in content]
        for name in dict.fromkeys(name for item in items for name in own_entries(item)):
            if name not in self.entries and self._reads(messages, tools, name):
                self.entries.add(name)

    def lacks(self, kinds: Sequence[str]) -> str:
        """Why the processor does not take media of these kinds, where it was loaded without a part."""
        reasons: Mapping[str, str] = getattr(self.processor, "lacks", {})
        return "; ".join(dict.fromkeys(reasons[kind] for kind in kinds if kind in reasons))

    def check_text(self, messages: Sequence[Message]) -> None:
        """Raise UnsafeText for a message whose text spells a special token: it could open a turn."""
        for message in map(self._shape_calls, messages):
            for name, value in message.items():
                items = value if name == "content" and isinstance(value, list | tuple) else [value]
                parts = [_without_source(item) if isinstance(item, Mapping) else item for item in items]
                for text in strings_in(parts):
                    if not self.plain.is_plain(text):
                        role = quote(message.get("role"))
                        raise UnsafeText(
                            f"the text {quote(text)} of a {role} message spells a special token: take it out"
                        )

    # -- tokens --------------------------------------------------------------------------------

    def adds_special(self, text: str) -> bool:
        """True if transformers lets the tokenizer add its own tokens to this rendered prompt."""
        bos = self.tokenizer.bos_token
        bare = self.processor is self.tokenizer  # a tokenizer's own apply_chat_template adds nothing
        return not bare and not (bos is not None and text.startswith(bos))

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of trusted text; ``special`` lets the tokenizer add its own."""
        return encode(self.tokenizer, text, special=special)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        with hold_tokenizer(self.tokenizer):
            return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def process(
        self,
        text: str,
        images: Sequence[Image.Image],
        clips: Sequence[Clip],
        *,
        special: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """What one call of the processor makes of a text with placeholders and its media.

        ``special`` as for `ids`. The media are those of one prompt, as the processor's own template method
        hands them. Raises UnreadableMedia for media that it refuses, ModalityNotSupported.
        """
        media = processor_media(images, clips)
        if images:
            media["images"] = [list(images)]
        try:
            with hold_tokenizer(self.tokenizer):
                outputs = self.processor(text=[text], add_special_tokens=special, **media, **options)
        except ImportError as error:
            raise ModalityNotSupported(f"the processor needs a package for {quote(text)}: {error}") from None
        except KameraError:
            raise
        except (ValueError, TypeError) as error:
            raise UnreadableMedia(f"the processor refuses {quote(text)}: {first_line(error)}") from error
        return dict(outputs)

    def token_types(self, ids: Sequence[int], names: Sequence[str]) -> dict[str, list[int]]:
        """The processor's own per-token inputs ``[tokens]`` of these names, as far as it makes them."""
        shared = getattr(self.processor, "create_mm_token_type_ids", None)
        makers = {name: getattr(self.processor, f"create_{name}", shared) for name in names}
        return {name: list(maker([list(ids)])[0]) for name, maker in makers.items() if maker is not None}

    # -- probes --------------------------------------------------------------------------------

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

    def placeholder(self, kind: str) -> str:
        """The text of a picture's (clip's) placeholder. Raises ModalityNotSupported if there is none."""
        token = getattr(self.processor, f"{kind}_token", None)
        if not token:
            raise ModalityNotSupported(f"{type(self.processor).__name__} takes no {kind}: leave it out")
        return str(token)

    def _wrapping(self) -> str:
        """What is written around a user's message."""
        try:
            seams = self.seams(None)
        except KameraError:
            return ""  # a template that Kamera cannot cut is refused at its first use
        return seams.prefix + seams.tail + seams.reopen

    def _wrapper(self, kind: str) -> tuple[str, str]:
        """What the template writes before and after the placeholder of every picture (clip)."""
        text, item = {"type": "text", "text": _MARK}, {"type": kind, kind: ""}
        whole = self.render([{"role": "user", "content": [text, item, text, item, text]}], generation=False)
        pieces = [piece.partition(self.placeholder(kind)) for piece in whole.split(_MARK)[1:-1]]
        if len(pieces) != 2 or not all(found for _, found, _ in pieces):
            return "", ""
        (prefix, _, suffix), (other_prefix, _, other_suffix) = pieces
        # some templates number them: what differs is no wrapper
        length = common_prefix(prefix[::-1], other_prefix[::-1])
        return prefix[len(prefix) - length :], suffix[: common_prefix(suffix, other_suffix)]

    def _frame(self, role: str) -> tuple[list[int], list[int]]:
        """Token ids that open a turn of ``role`` and close it; empty if ``role`` is not a turn."""
        head, rest = self._around(role)
        ids = self.ids(head)
        if self.opener is None or self.opener not in ids:
            return [], []
        last = len(ids) - 1 - ids[::-1].index(self.opener)
        return ids[last:], self.ids(rest)

    def _closing(self, role: str) -> str | None:
        """The text behind a message of ``role``, the last of a conversation; None if it is not known."""
        head, rest = self._around(role)
        return rest if head or rest else None

    def _around(self, role: str) -> tuple[str, str]:
        """The text before and behind a message of ``role``; empty if the template refuses or drops it."""
        for opening in ([], [{"role": "user", "content": "x"}]):
            try:
                text = self.render([*opening, {"role": role, "content": _MARK}], generation=False)
            except ModalityNotSupported:
                continue
            head, mark, rest = text.partition(_MARK)
            return (head, rest) if mark else ("", "")
        return "", ""

    def _placeholder_id(self, kind: str) -> int:
        ids = self.ids(self.placeholder(kind))
        if len(ids) != 1:
            raise ModalityNotSupported(
                f"the tokenizer has no one token for a {kind}'s placeholder: add it as a special token"
            )
        return ids[0]

    def _special_ids(self) -> list[int]:
        decoder: Mapping[int, Any] = getattr(self.tokenizer, "added_tokens_decoder", {})
        return [i for i, token in decoder.items() if token.special]

    def _reads(self, messages: Sequence[Message], tools: Sequence[Any] | None, name: str) -> bool:
        """True if the template writes something else without an entry of items."""
        others = [
            {**message, "content": [_without(item, name) for item in message["content"]]}
            if isinstance(message.get("content"), list | tuple)
            else message
            for message in messages
        ]
        texts = [self.render(some, tools=tools, generation=False) for some in (messages, others)]
        return texts[0] != texts[1]

    # -- forms ---------------------------------------------------------------------------------

    def _write(self, message: Message) -> dict[str, Any]:
        out, content = dict(self._shape_calls(message)), message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            out["content"] = [_item(item) for item in content]
        return self.with_shown_text(out)

    def with_shown_text(self, message: Message) -> dict[str, Any]:
        """The message with its text in the form that the template shows: a string, or a part of a list."""
        content = message.get("content")
        if isinstance(content, str) and content.strip() and self._text_form == "parts":
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and self._text_form == "string" and not media_items([message]):
            content = text_of(message)
        return {**message, "content": content} if "content" in message else dict(message)

    @lazy
    def _text_form(self) -> str:
        """The one form of a text that the template shows, "string" or "parts"; "" for one that shows both."""

        def shows(content: Any) -> bool:
            try:
                text = self.apply([{"role": "user", "content": content}], None, generation=False)
            except ModalityNotSupported:
                return False
            # a list that is written as Python or JSON writes it is not shown
            return _MARK in text and f"'text': '{_MARK}'" not in text and f'"text": "{_MARK}"' not in text

        string, parts = shows(_MARK), shows([{"type": "text", "text": _MARK}])
        return "" if string == parts else "string" if string else "parts"

    def _shape_calls(self, message: Message) -> Message:
        """A message with the arguments of its tool calls in the form that the template writes."""
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [*map(self._shape_call, calls)]} if calls else message

    def _shape_call(self, call: Any) -> Any:
        function: Any = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str) and self._arguments_form == "object":
            try:
                return {**call, "function": {**function, "arguments": json.loads(arguments)}}
            except (ValueError, RecursionError):
                return call
        if isinstance(arguments, Mapping) and self._arguments_form == "text":
            return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        return call

    @lazy
    def _arguments_form(self) -> str:
        """The one form of arguments of calls that the template shows, "object" or "text"; "" for both."""

        def write(arguments: Any) -> str:
            function = {"name": "f", "arguments": arguments}
            call = {"id": "kamera000", "type": "function", "function": function}
            question, text = ({"role": "user", "content": "x"}, {"role": "assistant", "content": ""})
            try:
                return self.apply([question, {**text, "tool_calls": [call]}], None, generation=False)
            except ModalityNotSupported:
                return ""

        as_object, as_text = write({_MARK: 1}), write(json.dumps({_MARK: 1}))
        takes_object = _MARK in as_object and f"'{_MARK}'" not in as_object
        takes_text = f'"{_MARK}": 1' in as_text
        return "" if takes_object == takes_text else "object" if takes_object else "text"


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
            kinds = [(item, _kind(item)) for item in content]
            items += [media_item(item, kind) for item, kind in kinds if kind != "text"]
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


def _item(item: Any) -> dict[str, Any]:
    """An item as a template is given it: its own entries, in the form that transformers makes of a url's."""
    kind = _kind(item)
    if f"{kind}_url" in item and kind != "text":
        return {"type": kind, "url": media_item(item, kind)[kind]}
    return {**item, "type": kind}


def _without(item: Any, name: str) -> Any:
    return {n: v for n, v in item.items() if n != name} if isinstance(item, Mapping) else item


def _without_source(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item without the entries that hold or name its media."""
    if kind_of(item) in (None, "text"):
        return item
    return {name: value for name, value in item.items() if name not in _SOURCES}


def _kind(item: Any) -> str:
    kind = kind_of(item)
    if kind is None:
        raise ModalityNotSupported(no_item_message(item))
    return kind
