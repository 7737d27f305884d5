"""Turns and media that are read from token ids are those that rendering the messages gives."""

from __future__ import annotations

import pytest

from kamera.content import Conversations, Rendered
from kamera.content.landmarks import LandmarkReader
from tests.content import templates
from tests.content.templates import LONG_TALK, TALK, screens

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


@pytest.mark.parametrize("count", [1, 3])
def test_pictures_are_found_with_their_wrappers(count):
    found, wanted = both(templates.seeing(), screens(count))
    assert found == wanted and len(found[1]) == count
