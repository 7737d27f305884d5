"""A client that edits its history by itself: its rule, found among common agents' policies, or by example.

What was sent is put together to the history that the client would have sent unedited. A policy is its rule if
it makes of that what was sent, at the turn that showed it and at the one before: then it says what comes
next, as if it had been given. Media are told apart by their places, so that none is kept for this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, NamedTuple, get_args

from kamera.content import Message, text_of, texts_of
from kamera.edits.examples import Both, alike, joined, rules_by_example
from kamera.edits.policies import clear_tool_results, keep_ends, keep_last_images
from kamera.edits.policies.calls import is_result
from kamera.edits.policies.images import Counted, Removed, pictures_of
from kamera.edits.policy import PLAIN, EditPolicy, apply_policy, same
from kamera.errors import EditPolicyFailed

_PLACEHOLDERS = 3
"""New texts that are tried as what stands for something that left: a rule writes one."""


class Foreseen(NamedTuple):
    """A next history; its messages from index ``known`` on may come otherwise."""

    messages: list[dict[str, Any]]
    known: int


class _Medium:
    """A picture or clip in a history, without its pixels."""


@dataclass(frozen=True, eq=False)
class Client:
    """What turns have told of a client.

    ``unedited`` is its history as far as it is known, ``given`` the last one it sent, both without pixels;
    ``rule`` makes the one of the other, None while nothing was edited. ``media`` are those of ``given``;
    ``repeats``: it sends the same ones again, and no copies. ``times``: turns in which it edited what it had
    sent before, and this rule said how, since it was found or `doubted`.
    """

    unedited: tuple[Message, ...] = ()
    given: tuple[Message, ...] = ()
    rule: EditPolicy | None = None
    media: dict[_Medium, Any] = field(default_factory=dict)
    repeats: bool = False
    times: int = 0

    def learn(self, before: Sequence[Message], given: Sequence[Message]) -> Client:
        """With one more turn: the history ``before`` it, which ends with an answer, and the one ``given``.

        What no rule makes of all that is known may be one of the last history alone. A turn that is neither
        begins anew, with what was given.
        """
        sent = tuple(_without_pixels(message) for message in given)
        start = max((i for i, m in enumerate(given) if m.get("role") == "assistant"), default=None)
        anew = Client(sent, sent, None, _media(sent, given) or {})
        if start is None or not self.given or _media(self.given, before[:-1]) is None:
            return anew
        unedited = (*self.unedited, *sent[start:])
        edits = not alike(sent[:start], self.given)
        for rule in chain([self.rule], _rules(unedited, sent, self)):
            found = _media_if_made(rule, unedited, given)
            if found is None or _media_if_made(rule, self.unedited, self.given) is None:
                continue
            again = [same(was, found[medium]) for medium, was in self.media.items() if medium in found]
            repeats = self.repeats or any(again)
            if all(again) or not repeats:  # else other pictures took their places
                times = (self.times if rule == self.rule else 0) + edits
                return Client(unedited, sent, rule, found, repeats, times)
        if self.unedited is self.given:
            return anew
        return replace(self, unedited=self.given, rule=None, times=0).learn(before, given)

    def doubted(self) -> Client:
        """The same, whose rule has yet to be seen at work."""
        return replace(self, times=0)

    def next(self, answer: Message, coming: Sequence[Message]) -> Foreseen | None:
        """What the client will send with ``coming`` behind the ``answer``; None if that is not known.

        Media of ``coming`` are any. Raises EditPolicyFailed.
        """
        if self.rule is None:
            return None
        ruled = apply_policy(self.rule, [*self.unedited, answer, *coming], 0)
        known = len(ruled) - len(coming)
        if known < 0 or [m.get("role") for m in ruled[known:]] != [m.get("role") for m in coming]:
            return None
        there = _media(ruled[:known], ruled[:known])  # all that it has
        if there is None or there.keys() - self.media.keys():
            return None
        shown = next(reversed(self.media.values()), None)  # in place of pictures that are not known yet
        return Foreseen([_with_pixels(message, self.media, shown) for message in ruled], known)


def _media_if_made(
    rule: EditPolicy | None, unedited: Sequence[Message], given: Sequence[Message]
) -> dict[_Medium, Any] | None:
    """The media of ``given`` if the rule makes it of ``unedited``, else None."""
    try:
        return _media(unedited if rule is None else apply_policy(rule, unedited, 0), given)
    except EditPolicyFailed:  # messages of a form that the policy does not take
        return None


def _rules(unedited: Sequence[Message], given: Sequence[Message], before: Client) -> Iterator[EditPolicy]:
    """Policies that may have made ``given`` of ``unedited``; most do not."""
    written = Counter(text for message in given for text in texts_of(message))
    written -= Counter(text for message in unedited for text in texts_of(message))
    placeholders = [text for text, _ in written.most_common(_PLACEHOLDERS)]
    for of in get_args(Counted):
        stay = len(pictures_of(given, of))
        left = len(pictures_of(unedited, of)) - stay
        earlier = len(pictures_of(before.unedited, of)) - len(pictures_of(before.given, of))
        for batch, removes in product(sorted({1, left, left - earlier}), get_args(Removed)):
            for placeholder in (None, *placeholders) if removes == "picture" else (None,):
                if batch > 0:
                    yield keep_last_images(stay, placeholder, of=of, batch=batch, removes=removes)
    front = next(
        (i for i, (a, b) in enumerate(zip(unedited, given, strict=False)) if _media([a], [b]) is None), 0
    )
    for head in range(front, max(front - 2, -1), -1):  # pictures alone are equal here, whichever they are
        if len(given) > head:
            yield keep_ends(head, len(given) - head)
    for text in placeholders:
        cleared = [text_of(message) == text for message in given if is_result(message)]
        if any(cleared):
            yield clear_tool_results(cleared.count(False), placeholder=text)
    yield from rules_by_example(unedited, given)
    if before.rule is not None:
        try:
            ruled = apply_policy(before.rule, unedited, 0)
        except EditPolicyFailed:
            return
        for rule in rules_by_example(ruled, given):
            yield Both(before.rule, rule)


# -- pixels ----------------------------------------------------------------------------------------


def _is_medium(value: Any) -> bool:
    named = isinstance(value, str) and value.startswith("data:")
    return named or not isinstance(value, (*PLAIN, dict, list, tuple))


def _without_pixels(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_pixels(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_pixels(inner) for inner in value]
    return _Medium() if _is_medium(value) else value


def _with_pixels(value: Any, media: Mapping[_Medium, Any], otherwise: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_pixels(inner, media, otherwise) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_pixels(inner, media, otherwise) for inner in value]
    return media.get(value, otherwise) if isinstance(value, _Medium) else value


def _media(pattern: Sequence[Message], given: Sequence[Message]) -> dict[_Medium, Any] | None:
    """The media of ``given`` by those in their places; None if the two differ in anything else."""
    found: dict[_Medium, Any] = {}
    return found if _equal(list(pattern), list(given), found) else None


def _equal(pattern: Any, given: Any, found: dict[_Medium, Any]) -> bool:
    if isinstance(pattern, _Medium):
        found[pattern] = given
        return _is_medium(given)
    if isinstance(pattern, dict) and isinstance(given, dict):
        same_keys = pattern.keys() == given.keys()
        return same_keys and all(_equal(joined(pattern[k]), joined(given[k]), found) for k in pattern)
    if isinstance(pattern, list | tuple) and isinstance(given, list | tuple):
        pairs = zip(pattern, given, strict=False)
        return len(pattern) == len(given) and all(_equal(a, b, found) for a, b in pairs)
    return isinstance(given, PLAIN) and pattern == given
