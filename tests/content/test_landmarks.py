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


def landmarks(rendered: Rendered) -> tuple[set[int], set[tuple[int, int]]]:
    """Starts of turns, that of the answer too, and spans of media, as the segments have them."""
    media = {(s.start, s.stop) for s in rendered.segments if s.media is not None}
    return {start for start, _ in rendered.turns} | {rendered.stable}, media


def both(processor, messages, **options) -> tuple[tuple[set, set], tuple[set, set]]:
    """The landmarks read from the token ids of a conversation, and those of its segments."""
    rendered = Conversations(processor).render(messages, **options)
    found = LandmarkReader(processor).of(rendered.ids.tolist())
    assert set(found.borders) <= borders(rendered)
    return (set(found.turns), set(found.media)), landmarks(rendered)


@pytest.mark.parametrize("style", OPENED)
@pytest.mark.parametrize("talk", [TALK, LONG_TALK, TALK[:1]], ids=["talk", "long", "one"])
def test_turns_are_the_segments_of_the_same_messages(style, talk):
    found, wanted = both(templates.speaker(style), talk)
    assert found == wanted


@pytest.mark.parametrize("style", ["thinking", "headers"])
def test_a_system_message_is_a_turn(style):
    found, wanted = both(templates.speaker(style), [SYSTEM, *TALK])
    assert found == wanted


def test_turns_of_tools_are_the_templates():
    found, wanted = both(templates.speaker("thinking"), AGENT, tools=TOOLS)
    assert found == wanted


@pytest.mark.parametrize("count", [1, 3])
def test_pictures_are_found_with_their_wrappers(count):
    found, wanted = both(templates.seeing(), screens(count))
    assert found == wanted and len(found[1]) == count


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
