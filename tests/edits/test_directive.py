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


def test_segments_are_counted_like_messages():
    last = len(_SCREENS.segments)
    (edit,) = resolve([Directive(last - 2, last, unit="segments")], _SCREENS, _tokenize)
    assert (edit.start, edit.stop) == (_SCREENS.segments[-2].start, _SCREENS.stable)


def test_an_insertion_between_messages_removes_nothing():
    (edit,) = resolve([Directive(1, 1, "note", unit="messages")], _TALK, _tokenize)
    assert edit.start == edit.stop == _TALK.turns[1][0] and len(edit.replacement) == 4


@pytest.mark.parametrize("cut", [(1, 0), (0, -1)], ids=["begins inside", "ends inside"])
def test_a_span_that_cuts_a_picture_is_refused_or_widened(cut):
    start, stop = _picture(0)
    directive = Directive(start + cut[0], stop + cut[1])
    with pytest.raises(InvalidDirective, match=f"give {start}:{stop}"):
        resolve([directive], _SCREENS, _tokenize)
    (edit,) = resolve([directive], _SCREENS, _tokenize, snap="widen")
    assert (edit.start, edit.stop) == (start, stop)


def test_a_span_across_a_turns_tag_is_widened_to_the_turn():
    begin, end = _TALK.turns[1]
    directive = Directive(begin + 1, begin + 12)
    with pytest.raises(InvalidDirective, match="cut a picture or a template tag"):
        resolve([directive], _TALK, _tokenize)
    (edit,) = resolve([directive], _TALK, _tokenize, snap="widen")
    assert (edit.start, edit.stop) == (begin, end)


def test_a_span_over_two_bodies_is_widened_to_both_turns():
    one, other = _TALK.turns[0], _TALK.turns[1]
    inside = Directive(one[1] - 5, other[0] + 25)
    (edit,) = resolve([inside], _TALK, _tokenize, snap="widen")
    assert (edit.start, edit.stop) == (one[0], other[1])


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


@pytest.mark.parametrize("unit", ["messages", "segments"])
def test_messages_and_segments_that_are_not_there_are_refused(unit):
    with pytest.raises(InvalidDirective, match=f"{unit} 0:99"):
        resolve([Directive(0, 99, unit=unit)], _TALK, _tokenize)


def test_a_directive_that_means_nothing_is_refused():
    for wrong in ({"start": 3, "end": 2}, {"start": -1, "end": 2}, {"start": 0.0, "end": 2}):
        with pytest.raises(InvalidDirective):
            Directive(**wrong)
    with pytest.raises(InvalidDirective, match="mode 'drop'"):
        Directive(0, 1, mode="drop")
    with pytest.raises(InvalidDirective, match="unit 'words'"):
        Directive(0, 1, unit="words")
    with pytest.raises(InvalidDirective, match="not a token id"):
        resolve([Directive(0, 1, [-5])], rendered("cde"), _tokenize)
