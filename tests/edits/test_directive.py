"""Directives are checked against the rendered prompt before anything is changed."""

from __future__ import annotations

import pytest

from kamera.content import Conversations
from kamera.edits import Directive, Edit, resolve
from kamera.errors import InvalidDirective
from tests.content import templates
from tests.content.templates import TALK, screens
from tests.edits.test_difference import rendered

_SEEING = templates.seeing()
_SCREENS = Conversations(_SEEING).render(screens(3))
_TALK = Conversations(templates.speaker("headers")).render(TALK)


def _tokenize(text: str) -> list[int]:
    return list(_SEEING.tokenizer(text)["input_ids"])


def _picture(n: int) -> tuple[int, int]:
    spans = [(s.start, s.stop) for s in _SCREENS.segments if s.media]
    return spans[n]


def test_a_message_is_its_whole_turn():
    (edit,) = resolve([Directive(1, 2, None, "forget", "messages")], _TALK, _tokenize)
    assert (edit.start, edit.stop) == _TALK.turns[1] and edit.directive.mode == "forget"
    assert (edit.start, edit.stop, edit.replacement) == (*_TALK.turns[1], ())


def test_a_picture_is_replaced_by_text_in_its_turn():
    start, stop = _picture(1)
    directive = Directive(start, stop, "[omitted]")
    (edit,) = resolve([directive], _SCREENS, _tokenize)
    assert edit == Edit(start, stop, tuple(_tokenize("[omitted]")), directive)


@pytest.mark.parametrize("cut", [(1, 0), (0, -1)], ids=["begins inside", "ends inside"])
def test_a_span_that_cuts_a_picture_is_refused_or_widened(cut):
    start, stop = _picture(0)
    directive = Directive(start + cut[0], stop + cut[1])
    with pytest.raises(InvalidDirective, match=f"give {start}:{stop}"):
        resolve([directive], _SCREENS, _tokenize)
    (edit,) = resolve([directive], _SCREENS, _tokenize, snap="widen")
    assert (edit.start, edit.stop) == (start, stop)


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(0, 4), (3, 6)], "overlap"),
        ([(2, 2), (2, 2)], "overlap"),
        ([(0, 13)], "ends after the prompt's 12 tokens"),
    ],
)
def test_overlapping_and_foreign_spans_are_refused(spans, says):
    with pytest.raises(InvalidDirective, match=says):
        resolve([Directive(a, b) for a, b in spans], rendered("cde"), _tokenize)
