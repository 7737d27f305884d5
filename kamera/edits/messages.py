"""Directives applied to messages, so that the conversation renders to the edited prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kamera.content import Conversations, Message, Rendered, Segment, kind_of
from kamera.edits.directive import Directive, Edit, Snap, resolve
from kamera.errors import InvalidDirective

_Messages = list[dict[str, Any] | None]


def edit_messages(
    conversations: Conversations,
    messages: Sequence[Message],
    directives: Sequence[Directive],
    *,
    tools: Sequence[Any] | None = None,
    snap: Snap = "refuse",
) -> list[dict[str, Any]]:
    """The messages after ``directives``, whose indices refer to the prompt from `Conversations.render`.

    A span of messages is removed; with a replacement text its first message stays and holds the text. A span
    of segments or tokens removes whole messages, pictures and parts of texts. The result is rendered and must
    equal the prompt with the span replaced, token for token. Raises InvalidDirective if no change of the
    messages has that effect, and the errors of `resolve`.
    """
    rendered = conversations.render(messages, tools=tools)
    # from the end, so that earlier positions stay valid
    edits = resolve(directives, rendered, conversations.tokenize, snap=snap)[::-1]
    out: _Messages = [dict(m) for m in messages]
    inner = [edit for edit in edits if edit.directive.unit != "messages"]
    for edit in inner:
        _cut(out, edit, rendered, conversations)
    if inner:
        _check(conversations, _remaining(out), rendered, inner, tools)
    for edit in edits:
        if edit.directive.unit == "messages":
            _replace(out, edit.directive, conversations)
    return _remaining(out)


def _remaining(messages: _Messages) -> list[dict[str, Any]]:
    left = [m for m in messages if m is not None]
    if not left:
        raise InvalidDirective("the directives leave no message: keep at least one")
    return left


def _replace(out: _Messages, directive: Directive, conversations: Conversations) -> None:
    start, end, text = directive.start, directive.end, directive.replacement
    if text is not None and not isinstance(text, str):
        raise InvalidDirective(f"messages {start}:{end} become token ids, which no message holds: give text")
    if text is not None and start == end:
        raise InvalidDirective(
            f"a message before message {start} needs a role: send the history with it in its place"
        )
    first = out[start] if text is not None else None
    out[start:end] = [None] * (end - start)
    if first is not None:
        out[start] = conversations.spoken({**first, "content": text})


def _cut(out: _Messages, edit: Edit, rendered: Rendered, conversations: Conversations) -> None:
    """Replace the tokens of ``edit`` in the messages by its replacement as text."""
    text: str | None = conversations.decode(edit.replacement) if edit.replacement else None
    touched = [s for s in rendered.segments if s.start < edit.stop and edit.start < s.stop]
    if not touched:  # an insertion goes to the end of the text before it
        touched = [s for s in rendered.segments if s.start <= edit.start <= s.stop][:1]
    cut = {s.messages for s in rendered.segments if not edit.start <= s.start <= s.stop <= edit.stop}
    whole = {s.messages for s in touched if s.messages[0] < s.messages[1]} - cut
    for first, end in whole:
        out[first:end] = [None] * (end - first)
    places: list[tuple[Segment, int, int]] = []
    for segment in touched:
        if segment.messages in whole:
            continue
        start, stop = max(segment.start, edit.start), min(segment.stop, edit.stop)
        last = places[-1] if places else None
        if last and last[0].messages == segment.messages and last[0].media is None is segment.media:
            places[-1] = (last[0], last[1], stop)
        else:
            places.append((segment, start, max(start, stop)))
    if text is not None and not places:
        raise InvalidDirective(
            f"tokens {edit.start}:{edit.stop} are whole messages, and text outside a message cannot be kept: "
            'give unit="messages"'
        )
    for number, (segment, start, stop) in reversed(list(enumerate(places))):
        _replace_part(out, rendered, segment, (start, stop), text if number == 0 else None, conversations)


def _replace_part(
    out: _Messages,
    rendered: Rendered,
    segment: Segment,
    span: tuple[int, int],
    text: str | None,
    conversations: Conversations,
) -> None:
    """Replace a picture, or the tokens ``span`` of the texts around ``segment``, in the message it is of."""
    index, end = segment.messages
    if end - index != 1:
        raise InvalidDirective(
            f"tokens {segment.start}:{segment.stop} are of messages {index}:{end}, which the template "
            "renders in one piece: edit those messages"
        )
    message = out[index]
    assert message is not None
    own = [s for s in rendered.segments if s.messages == segment.messages]
    content = message.get("content")
    items = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    # pictures after it may be removed already, those before it are not
    pictures = sum(s.media is not None and s.start < span[0] for s in own)
    borders = [-1, *(i for i, item in enumerate(items) if kind_of(item) != "text"), len(items)]
    first, last = borders[pictures] + 1, borders[pictures + 1]
    if segment.media is not None and span[0] < span[1]:
        items[last : last + 1] = [] if text is None else [{"type": "text", "text": text}]
    else:
        ids = rendered.ids.tolist()
        before, gone = (conversations.decode(ids[a:b]) for a, b in ((own[0].start, span[0]), span))
        joined = "".join(item["text"] for item in items[first:last])
        # the tokens before the span: a picture or the template's opening, then these texts up to a position
        places = [at for at in range(len(joined) + 1) if joined.startswith(gone, at)]
        found = [at for at in places if before.endswith(joined[:at].lstrip())]
        if not found or first == last:
            raise InvalidDirective(
                f"tokens {span[0]}:{span[1]} are {gone[:40]!r}, which is not in a text of message {index}: "
                "the template wrote it; edit the whole message"
            )
        items[first:last] = _without_text(items[first:last], found[-1], found[-1] + len(gone), text or "")
    out[index] = {**message, "content": items[0]["text"] if isinstance(content, str) else items}


def _without_text(items: Sequence[Any], start: int, stop: int, text: str) -> list[Any]:
    """Text items with ``text`` in place of the characters ``start:stop`` of all of them."""
    left, begun = [], 0
    for i, item in enumerate(items):
        ended = begun + len(item["text"])
        here = begun <= start < ended or (i == len(items) - 1 and start == ended)
        kept = item["text"][: max(0, start - begun)] + (text if here else "")
        left.append({**item, "text": kept + item["text"][max(0, stop - begun) :]})
        begun = ended
    return left


def _check(
    conversations: Conversations,
    messages: Sequence[Message],
    before: Rendered,
    edits: Sequence[Edit],
    tools: Sequence[Any] | None,
) -> None:
    wanted = before.ids[: before.stable].tolist()
    for edit in edits:  # from the end
        wanted[edit.start : edit.stop] = edit.replacement
    after = conversations.render(messages, tools=tools)
    if after.ids[: after.stable].tolist() != wanted:
        spans = ", ".join(f"{e.start}:{e.stop}" for e in edits)
        raise InvalidDirective(
            f"no change of the messages has the effect of the directives on tokens {spans}: the template or "
            'the tokenizer writes others; edit whole segments, or give unit="messages"'
        )
