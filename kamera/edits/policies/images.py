"""Keep the last pictures, as agents that use computers, phones and browsers do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kamera.content import Message
from kamera.edits.policies.calls import blocks_of, is_result, without_calls
from kamera.edits.policy import PolicyFunction, written
from kamera.errors import quote

Counted = Literal["all", "results"]
Removed = Literal["picture", "call", "step"]

_KINDS = ("image", "image_url", "input_image", "computer_screenshot")


@written
def keep_last_images(
    n: int,
    placeholder: str | None = None,
    *,
    of: Counted = "all",
    batch: int = 1,
    removes: Removed = "picture",
) -> PolicyFunction:
    """Remove all pictures except the ``n`` latest.

    ``placeholder`` replaces them (Agent-TARS writes "[Image omitted to conserve context]"); None leaves
    nothing: a user's message of pictures only is removed whole, a tool's result stays, emptied. ``batch``:
    pictures are removed only when that many can be removed at once, which spares a prefix cache (OmniParser:
    10). ``of="results"``: only pictures of tools' results are counted and removed: those in the result, and
    those in a user's message that has nothing else and follows one. ``removes``: what leaves with a picture:

    * ``picture``: nothing.
    * ``call``: its message, unless a later picture in it stays, and the call whose result that is. Text
      beside the call stays.
    * ``step``: that, and the reasoning: the text beside the call, or the Responses item right before it.

    Messages are OpenAI's chat messages, Responses items, or Anthropic's. Raises `ValueError` for a negative
    ``n``, a batch below 1, an unknown ``of`` or ``removes``, or a placeholder where calls leave.
    """
    if n < 0 or batch < 1:
        raise ValueError(f"n={n}, batch={batch}: keep 0 or more pictures, in batches of 1 or more")
    for name, value, known in (("of", of, get_args(Counted)), ("removes", removes, get_args(Removed))):
        if value not in known:
            raise ValueError(f"{name}={quote(value)} is none of {', '.join(known)}")
    if removes != "picture" and placeholder is not None:
        raise ValueError(f"placeholder {quote(placeholder)} where removes={removes!r}: give one of the two")

    def keep_last_images(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        counted = pictures_of(messages, of)
        first = max(0, len(counted) - n) // batch * batch
        leaving, staying = counted[:first], counted[first:]
        if removes == "picture":
            return _remove_pictures(messages, leaving, placeholder)
        kept = {p.message for p in staying}
        gone = {i for p in leaving if p.message not in kept for i in (p.message, p.result) if i is not None}
        return without_calls(messages, gone, reasoning=removes == "step")

    return keep_last_images


@dataclass(frozen=True)
class PicturePlace:
    """A picture's place: the index of its message, and of its item, its inner item in a ``tool_result``.

    ``result`` is the message of the tool's result that it belongs to.
    """

    message: int
    path: tuple[int, ...]
    result: int | None


def pictures_of(messages: Sequence[Message], of: Counted) -> list[PicturePlace]:
    """The pictures that `keep_last_images` counts, in order."""
    found = []
    for i, message in enumerate(messages):
        result = i if is_result(message) else i - 1 if _shows_result(messages, i) else None
        if _is_image(message.get("output")):
            found.append(PicturePlace(i, (), i))
        blocks = dict(blocks_of(message, "tool_result"))
        for k, item in enumerate(_items(message)):
            if _is_image(item):
                found.append(PicturePlace(i, (k,), result))
            elif k in blocks:
                inner = enumerate(_items(item))
                found += [PicturePlace(i, (k, m), i) for m, one in inner if _is_image(one)]
    return [picture for picture in found if of == "all" or picture.result is not None]


def _shows_result(messages: Sequence[Message], i: int) -> bool:
    """True for a user's message of pictures only, after a tool's result: APIs that take none there."""
    items = _items(messages[i])
    shows = messages[i].get("role") == "user" and bool(items) and all(map(_is_image, items))
    return shows and i > 0 and is_result(messages[i - 1])


def _remove_pictures(
    messages: Sequence[Message], leaving: Collection[PicturePlace], placeholder: str | None
) -> list[dict[str, Any]]:
    """Messages without these pictures; those of nothing else are removed, unless they are results."""
    places: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for picture in leaving:
        places[picture.message].add(picture.path)
    out = (_replace(m, places[i], placeholder) if i in places else dict(m) for i, m in enumerate(messages))
    return [message for message in out if message is not None]


def _replace(
    message: Message, places: Collection[tuple[int, ...]], placeholder: str | None
) -> dict[str, Any] | None:
    if () in places:
        return {**message, "output": placeholder or ""}
    kept: list[Any] = []
    for k, item in enumerate(_items(message)):
        inner = {path[1:] for path in places if path[0] == k}
        if () in inner:
            kind = "input_text" if item.get("type") == "input_image" else "text"
            kept += [] if placeholder is None else [{"type": kind, "text": placeholder}]
        elif inner:
            kept.append(_replace(item, inner, placeholder))
        else:
            kept.append(item)
    if not kept and not is_result(message) and message.get("type") != "tool_result":
        return None
    return {**message, _field(message): kept}


def _items(message: Message) -> list[Any]:
    content = message.get(_field(message))
    return list(content) if isinstance(content, list | tuple) else []


def _field(message: Message) -> str:
    """Responses items of results hold ``output``, all else ``content``."""
    return "content" if "content" in message else "output"


def _is_image(item: Any) -> bool:
    return isinstance(item, dict) and (item.get("type") in _KINDS or ("type" not in item and "image" in item))
