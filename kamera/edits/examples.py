"""Edits learned by example: the rules that make of a history what a client was seen to make of it.

Three things happen to a message: it leaves, alone or with those beside it, whose place a note may take; a
part of it leaves; or a part becomes another text. Which messages it happens to is told by their kind and by
how many of that kind stay as they are behind it: so each rule says what happens to the next one, or the next
batch. Numbers in a text that is written instead count on. One example allows several rules; who has seen more
chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from kamera.content import Message, common_prefix, kind_of, text_of
from kamera.edits.policy import PLAIN, EditPolicy, apply_policy

_MOST, _TRIED = 12, 400
"""Ways to write a text, or to change a message, that one example is taken to show, and that are tried."""

_NUMBERS = 3
"""Numbers of a text that may count on."""

_NUMBER = re.compile(r"(?<!\d)(\d{1,9})(?!\d)")
_TAG = re.compile(r"<(\w+)>")
_LABEL = re.compile(r"\s*[A-Z]\w*:")

Kind = tuple[Any, ...]
"""What a client tells messages apart by: the role; or also whether tools are called, and kinds of items."""

Counts = Mapping[str, int]
"""What a number in a text may count, by name."""


def kind(message: Message) -> Kind:
    """The kind of a message, the narrowest."""
    content = joined(message.get("content"))
    items = [kind_of(item) for item in content] if isinstance(content, list | tuple) else ["text"]
    return message.get("role"), bool(message.get("tool_calls")), *items


def is_of(message: Message, of: Kind) -> bool:
    """Whether a message is of a kind."""
    return kind(message)[: len(of)] == of


def joined(content: Any) -> Any:
    """Content that is texts alone as one: a server reads it so, once a picture has left it."""
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        return content
    texts = [item["text"] for item in content if item.keys() == {"type", "text"}]
    whole = bool(texts) and len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if whole else content


def alike(one: Any, other: Any) -> bool:
    """Equality of messages but for their media."""
    one, other = joined(one), joined(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, PLAIN) or isinstance(other, PLAIN):
        return bool(one == other) and isinstance(other, PLAIN)
    return not isinstance(one, dict | list | tuple) and not isinstance(other, dict | list | tuple)


def rules_by_example(before: Sequence[Message], after: Sequence[Message]) -> Iterator[EditPolicy]:
    """Rules that make ``after`` of ``before``, the likeliest first."""
    for rule in _candidates(before, after):
        try:
            made = rule.transform(before, 0)
        except KeyError:  # a number that a text before does not have
            continue
        if alike(list(made), list(after)):
            yield rule


def _candidates(before: Sequence[Message], after: Sequence[Message]) -> Iterator[Cutting | Rewriting]:
    cuttings = [*_cuttings(before, after)]
    whole = [c for c in cuttings if c.note is not None or is_of(before[c.head], c.begins[:1])]
    yield from whole
    yield from _rewritings(before, after)
    yield from (cutting for cutting in cuttings if cutting not in whole)


@dataclass(frozen=True)
class Both:
    """One rule, and another on what it leaves."""

    first: EditPolicy
    second: EditPolicy

    def transform(self, messages: Sequence[Message], turn: int) -> Sequence[Message]:
        """The messages after both."""
        return apply_policy(self.second, apply_policy(self.first, messages, turn), turn)


# -- texts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """A text whose numbers count: texts, and names of counts with what is added to them."""

    parts: tuple[str | tuple[str, int], ...]

    def written(self, counts: Counts) -> str:
        """The text. Raises KeyError if one of its numbers is not known."""
        return "".join([p if isinstance(p, str) else str(counts[p[0]] + p[1]) for p in self.parts])


@dataclass(frozen=True)
class Shortened:
    """The first ``head`` characters of a text (None: its first line), ``words``, the last ``tail`` ones."""

    head: int | None
    words: Words
    tail: int

    def change(self, text: str, counts: Counts) -> str:
        """The text after it; one with nothing in between stays."""
        head = text.find("\n") + 1 if self.head is None else self.head
        if (head or self.tail) and len(text) <= head + self.tail:
            return text
        counts = {**counts, "cut": len(text) - head - self.tail}
        return text[:head] + self.words.written(counts) + text[len(text) - self.tail :]


@dataclass(frozen=True)
class Stripped:
    """Each part of a text from ``opens`` to ``closes`` leaves it, with the blanks behind it if ``blank``.

    With "" for ``opens`` its beginning leaves, up to what ``closes``, which stays.
    """

    opens: str
    closes: str
    blank: bool = False

    def change(self, text: str, counts: Counts) -> str:
        """The text after it. One pass, whatever the text: a form of it is a stranger's."""
        if not self.opens:
            return text[max(0, text.find(self.closes)) :]
        kept, at = list[str](), 0
        while (start := text.find(self.opens, at)) >= 0 and (end := text.find(self.closes, start)) >= 0:
            kept.append(text[at:start])
            at = end + len(self.closes)
            while self.blank and text[at : at + 1].isspace():
                at += 1
        return "".join([*kept, text[at:]])


TextChange = Shortened | Stripped


def _wordings(text: str, counts: Counts, *running: str) -> Iterator[Words]:
    """Ways to write a text; of all counts those ``running`` are told by their growth alone."""
    parts = _NUMBER.split(text)
    if len(parts) > 2 * _NUMBERS + 1:
        parts = [text]
    options: list[list[str | tuple[str, int]]] = []
    for i, part in enumerate(parts):
        options.append([part])
        if i % 2 and str(int(part)) == part:
            number = int(part)
            equal = [(name, 0) for name, count in counts.items() if count == number]
            grown = [(name, number - counts[name]) for name in running if counts[name] != number]
            options[-1] = [*equal, *grown, part]
    for chosen in islice(product(*options), _MOST):
        yield Words(tuple(part for part in chosen if part != ""))


def _numbers_in(text: str) -> dict[str, int]:
    found = islice(_NUMBER.finditer(text), _NUMBERS)
    return {f"number {i}": int(number[1]) for i, number in enumerate(found)}


def _text_changes(old: str, new: str, counts: Counts) -> Iterator[TextChange]:
    """Ways in which one text becomes another."""
    for tag in dict.fromkeys(_TAG.findall(old)):
        for blank in (True, False):
            yield Stripped(f"<{tag}>", f"</{tag}>", blank)
    label = _LABEL.match(new)
    if label is not None and old.endswith(new):
        yield Stripped("", label[0])
    head = common_prefix([*old], [*new])
    tail = common_prefix([*old[head:][::-1]], [*new[head:][::-1]])
    line = old.find("\n") + 1
    ways = [(head, head, tail), (head, head, 0), (line, None, 0), (0, 0, 0)]
    for kept, first, last in sorted(ways, key=lambda way: way[1:] != (None, 0) or line < head):
        if kept <= head and kept + last <= len(new):
            middle = {**counts, "cut": len(old) - kept - last}
            for words in _wordings(new[kept : len(new) - last], middle, "ordinal"):
                yield Shortened(first, words, last)


# -- messages that leave, and what stands for them -------------------------------------------------


@dataclass(frozen=True)
class Note:
    """A message with a text that counts what left."""

    fields: tuple[tuple[str, Any], ...]
    words: Words
    listed: bool

    def message(self, counts: Counts) -> dict[str, Any]:
        """The message."""
        text = self.words.written(counts)
        return {**dict(self.fields), "content": [{"type": "text", "text": text}] if self.listed else text}


@dataclass(frozen=True)
class Cutting:
    """The first ``head`` messages stay, and all from the ``keep``-th last of the kind ``begins`` on.

    Of that kind a whole ``batch`` leaves at once; until there is one, all stay.
    """

    head: int
    begins: Kind
    keep: int
    batch: int
    note: Note | None = None

    def transform(self, messages: Sequence[Message], turn: int) -> list[Message]:
        """The messages after it, with the ``note`` in place of those that left."""
        starts = [i for i, m in enumerate(messages) if i >= self.head and is_of(m, self.begins)]
        leaving = max(0, len(starts) - self.keep) // self.batch * self.batch
        stop = starts[leaving] if leaving else self.head
        if stop <= self.head:
            return [*messages]
        gone = messages[self.head : stop]
        note = [] if self.note is None else [self.note.message(_counts(gone))]
        return [*messages[: self.head], *note, *messages[stop:]]


def _counts(messages: Sequence[Message]) -> dict[str, int]:
    """What a note may say of messages that left."""
    roles = [str(message.get("role")) for message in messages]
    characters = sum(len(text_of(message)) for message in messages)
    by_role = {role: roles.count(role) for role in ("user", "assistant", "tool")}
    return {"messages": len(messages), **by_role, "characters": characters}


def _cuttings(before: Sequence[Message], after: Sequence[Message]) -> Iterator[Cutting]:
    front = next((i for i, pair in enumerate(zip(before, after, strict=False)) if not alike(*pair)), None)
    front = min(len(before), len(after)) if front is None else front
    pairs = zip(reversed(before), reversed(after), strict=False)
    back = next((i for i, pair in enumerate(pairs) if not alike(*pair)), min(len(before), len(after)))
    for written in (0, 1):
        heads = {min(front, len(after) - written), max(0, len(after) - written - back)}
        for head in sorted(heads, reverse=True):
            stay = len(after) - head - written
            gone = len(before) - head - stay
            if not (0 < stay <= back and head <= front and gone > written):
                continue
            tail = before[len(before) - stay :]
            notes: list[Note | None] = [None]
            if written:
                notes = [*_notes(after[head], _counts(before[head : head + gone]))]
            for begins, note in product((kind(tail[0])[:1], kind(tail[0])), notes):
                left, keep = (
                    sum(is_of(message, begins) for message in part)
                    for part in (before[head : head + gone], tail)
                )
                for batch in dict.fromkeys((1, max(1, left))):
                    yield Cutting(head, begins, keep, batch, note)


def _notes(message: Message, counts: Counts) -> Iterator[Note]:
    text, content = joined(message.get("content")), message.get("content")
    fields = tuple((name, value) for name, value in message.items() if name != "content")
    if isinstance(text, str) and all(isinstance(value, PLAIN) for _, value in fields):
        for words in _wordings(text, counts, "messages", "user"):
            yield Note(fields, words, not isinstance(content, str))


# -- messages that change --------------------------------------------------------------------------


@dataclass(frozen=True)
class Rewrite:
    """Fields that leave a message, fields that are set, and what becomes of items, by their kinds.

    An item of no kind in ``items`` stays, one with None leaves, any other becomes a text. With ``whole`` all
    content becomes one text.
    """

    leave: frozenset[str] = frozenset()
    sets: tuple[tuple[str, Any], ...] = ()
    items: tuple[tuple[str | None, TextChange | None], ...] = ()
    whole: Words | None = None

    def change(self, message: Message, ordinal: int) -> dict[str, Any]:
        """The message after it, the ``ordinal``-th that it happens to. Raises KeyError."""
        out = {name: value for name, value in message.items() if name not in self.leave}
        out |= {name: value for name, value in self.sets if name in message}
        if "content" not in out:
            return out
        content, text = out["content"], text_of(message)
        counts = {"ordinal": ordinal, "characters": len(text), **_numbers_in(text)}
        if self.whole is not None:
            return {**out, "content": self.whole.written(counts)}
        if self.items:
            out["content"] = _change_items(content, dict(self.items), counts)
        return out


def _change_items(content: Any, changes: Mapping[str | None, TextChange | None], counts: Counts) -> Any:
    items = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    out: list[Any] = []
    for item in items:
        name = kind_of(item)
        change = changes.get(name)
        if change is not None:
            text = change.change(item["text"] if name == "text" else "", counts)
            out.append({**item, "text": text} if name == "text" else {"type": "text", "text": text})
        elif name not in changes:
            out.append(item)
    return out if isinstance(content, list | tuple) else "".join([item["text"] for item in out])


@dataclass(frozen=True)
class Kept:
    """Of the messages of a ``kind`` from index ``first`` on, all but the last ``keep`` change, or leave.

    That happens to a whole ``batch`` at once.
    """

    kind: Kind
    first: int
    keep: int
    batch: int
    rewrite: Rewrite | None

    def of(self, messages: Sequence[Message]) -> list[int]:
        """Indices of those that change."""
        own = [i for i, m in enumerate(messages) if i >= self.first and is_of(m, self.kind)]
        return own[: max(0, len(own) - self.keep) // self.batch * self.batch]


@dataclass(frozen=True)
class Rewriting:
    """What happens to messages of several kinds."""

    kinds: tuple[Kept, ...]

    def transform(self, messages: Sequence[Message], turn: int) -> list[Message]:
        """The messages after it."""
        out: dict[int, Message] = dict(enumerate(messages))
        for kept in self.kinds:
            for ordinal, i in enumerate(kept.of(messages), 1):
                if kept.rewrite is None:
                    del out[i]
                else:
                    out[i] = kept.rewrite.change(messages[i], ordinal)
        return [*out.values()]


def _rewritings(before: Sequence[Message], after: Sequence[Message]) -> Iterator[Rewriting]:
    pairs = _pairs(before, after)
    changed = [i for i, other in pairs.items() if other is None or not alike(before[i], other)]
    widths = [1, None]
    if any(part not in (None, "text") for i in changed for part in kind(before[i])[2:]):
        widths.reverse()  # who shows pictures counts these
    for width in widths if changed else ():
        kinds = dict.fromkeys(kind(before[i])[:width] for i in changed)
        options = [[*islice(_kept(of, before, pairs, changed), _MOST)] for of in kinds]
        for chosen in islice(product(*options), _MOST):
            yield Rewriting(chosen)


def _pairs(before: Sequence[Message], after: Sequence[Message]) -> dict[int, Message | None]:
    """By index before, the message after; None for one that left. Empty where that cannot be told."""
    if len(before) == len(after):
        roles = [message.get("role") for message in before] == [message.get("role") for message in after]
        return dict(enumerate(after)) if roles else {}
    pairs, at = dict[int, Message | None](), 0
    for i, message in enumerate(before):
        pairs[i] = after[at] if at < len(after) and alike(message, after[at]) else None
        at += pairs[i] is not None
    return pairs if at == len(after) else {}


def _kept(
    of: Kind, before: Sequence[Message], pairs: Mapping[int, Message | None], changed: Sequence[int]
) -> Iterator[Kept]:
    own = [i for i in changed if is_of(before[i], of)]
    after = pairs[own[0]]
    keep = sum(i > own[-1] and is_of(m, of) for i, m in enumerate(before))
    batches = dict.fromkeys((1, sum(is_of(m, of) for m in before[own[0] : own[-1] + 1])))
    for rewrite in (None,) if after is None else _rewrites(before[own[0]], after):
        for batch in batches:
            yield Kept(of, own[0], keep, batch, rewrite)


def _rewrites(old: Message, new: Message) -> Iterator[Rewrite]:
    """Ways in which a message, the first of its kind, becomes another."""
    others = [name for name in new if name != "content" and name in old and not alike(old[name], new[name])]
    if new.keys() - old.keys() or not all(isinstance(new[name], PLAIN) for name in others):
        return
    leave, sets = frozenset(old.keys() - new.keys()), tuple((name, new[name]) for name in others)
    if "content" not in new or alike(old.get("content"), new["content"]):
        yield Rewrite(leave, sets)
        return
    text, written = text_of(old), joined(new["content"])
    counts = {"ordinal": 1, "characters": len(text), **_numbers_in(text)}
    for items in islice(_item_changes(old["content"], new["content"], counts), _TRIED):
        rewrite = Rewrite(leave, sets, items)
        if alike(rewrite.change(old, 1), new):
            yield rewrite
    if isinstance(written, str):
        for words in _wordings(written, counts, "ordinal"):
            yield Rewrite(leave, sets, whole=words)


def _item_changes(
    old: Any, new: Any, counts: Counts
) -> Iterator[tuple[tuple[str | None, TextChange | None], ...]]:
    """What may have become of the items of a message, by their kinds."""
    listed = [content if isinstance(content, list | tuple) else [content] for content in (old, new)]
    items, others = ([{"type": "text", "text": i} if isinstance(i, str) else i for i in c] for c in listed)
    texts = [item["text"] for item in items if kind_of(item) == "text"]
    fresh = [item["text"] for item in others if kind_of(item) == "text" and item["text"] not in texts]
    options: list[list[tuple[tuple[str | None, TextChange | None], ...]]] = []
    for name in dict.fromkeys(map(kind_of, items)):
        changes: list[TextChange | None] = [None]
        for text in fresh[:_NUMBERS]:
            if name == "text":
                ways = _text_changes(texts[0], text, counts)
                changes += [way for way in ways if way.change(texts[0], counts) == text]
            else:
                changes += [Shortened(0, words, 0) for words in _wordings(text, counts, "ordinal")]
        options.append([(), *(((name, change),) for change in changes)])
    for chosen in product(*options):
        whole = tuple(one for some in chosen for one in some)
        if whole:
            yield whole
