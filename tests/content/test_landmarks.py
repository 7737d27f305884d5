"""Turns and media that are read from token ids are those that rendering the messages gives."""

from __future__ import annotations

import pytest

from kamera.content import Conversations, Rendered
from kamera.content.landmarks import LandmarkReader
from kamera.errors import ProcessorRequired
from tests.content import templates
from tests.content.templates import AGENT, LONG_TALK, TALK, TOOLS, screens

SYSTEM = {"role": "system", "content": "You are careful."}
OPENED = ["thinking", "headers", "turns"]


def borders(rendered: Rendered) -> set[int]:
    return {0, *(s.stop for s in rendered.segments)}


def check(processor, messages, **options) -> None:
    """Every landmark is a border of segments, and every start of a turn and edge of media is a landmark."""
    rendered = Conversations(processor).render(messages, **options)
    found = LandmarkReader(processor).of(rendered.ids.tolist())
    assert {start for start, _ in rendered.turns} == set(found.turns) - {rendered.stable}
    assert rendered.stable in found.turns  # the answer's turn
    media = {(s.start, s.stop) for s in rendered.segments if s.media is not None}
    assert set(found.media) == media
    assert set(found.borders) <= borders(rendered)


@pytest.mark.parametrize("style", OPENED)
@pytest.mark.parametrize("talk", [TALK, LONG_TALK, TALK[:1]], ids=["talk", "long", "one"])
def test_turns_are_the_segments_of_the_same_messages(style, talk):
    check(templates.speaker(style), talk)


@pytest.mark.parametrize("style", ["thinking", "headers"])
def test_a_system_message_is_a_turn(style):
    check(templates.speaker(style), [SYSTEM, *TALK])


def test_turns_of_tools_are_the_templates():
    check(templates.speaker("thinking"), AGENT, tools=TOOLS)


@pytest.mark.parametrize("count", [1, 3])
def test_pictures_are_found_with_their_wrappers(count):
    check(templates.seeing(), screens(count))


@pytest.mark.parametrize("style", ["instructions", "plain"])
def test_a_template_without_an_opening_token_has_no_turns(style):
    tokenizer = templates.speaker(style)
    ids = Conversations(tokenizer).render(TALK).ids.tolist()
    assert LandmarkReader(tokenizer).of(ids) == ((), ())


def test_a_picture_at_the_edge_of_the_ids_has_a_span_within_them():
    processor = templates.seeing()
    rendered = Conversations(processor).render(screens(1))
    (image,) = [s for s in rendered.segments if s.media is not None]
    ids, reader = rendered.ids.tolist(), LandmarkReader(processor)
    assert reader.of(ids[image.start + 1 : image.stop - 1]).media == ((0, image.num_tokens - 2),)
    assert reader.of(ids[: image.stop - 1]).media == ((image.start, image.stop - 1),)
    assert reader.of([]) == ((), ())


def test_without_a_template_nothing_is_read():
    tokenizer = templates.speaker("plain")
    tokenizer.chat_template = None
    with pytest.raises(ProcessorRequired, match="chat template"):
        LandmarkReader(tokenizer)
