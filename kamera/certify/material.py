"""Documents that `certify` reads: the user's own pictures and texts, or those that Kamera brings along."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from PIL import Image, UnidentifiedImageError

from kamera import testbed
from kamera.errors import quote

LEAVE, STAY = 4, 4
"""Chunks of a document, at most: those that stand in front and leave, and those that are judged."""

PASSAGE = 500
"""Characters from which on a passage ends at the next empty line; it is cut at twice as many."""

QUESTION = (
    "What does the last one say, and how does it relate to what came before it? Answer in two sentences."
)

ASKED = 8
"""Questions about a scene of the world."""

SEED = 400_000
"""Of the world's scenes; the shipped backbones were trained on seeds from a million on."""

_LAYOUT = "LLLLLRLI"
"""Legends, one of which is renamed, and the items that they give values; small letters are text."""

Content = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Document:
    """Chunks as chat content, of which the first may have left, and questions about those that stay."""

    leaving: Sequence[Content]
    staying: Sequence[Content]
    questions: tuple[str, ...]


def world() -> Iterator[Document]:
    """Scenes of the shipped backbone's world, whose frames decide each other's meaning; without an end."""
    for index in itertools.count():
        episode = testbed.World(SEED).episode(index, layout=_LAYOUT)
        order = range(LEAVE, LEAVE + STAY)
        tags = itertools.islice(episode.frames[-1].glyph_of, ASKED)
        questions = tuple(episode.ask("value", tag, order).text for tag in tags)
        contents = [frame.content for frame in episode.frames]
        yield Document(contents[:LEAVE], contents[LEAVE:], questions)


def prose() -> Iterator[Document]:
    """Passages of Python's own manual, one topic a document."""
    for text in topics.values():
        if len(found := passages(text)) >= LEAVE + STAY:
            yield Document(found[:LEAVE], found[LEAVE : LEAVE + STAY], (QUESTION,))


def own(files: Sequence[Path], questions: Sequence[str]) -> Iterator[Document]:
    """Documents out of pictures and texts: neighbours first, then drawn at random, without an end.

    Of fewer than ``LEAVE + STAY`` each document has all. Raises ValueError for fewer than three, or for a
    file that is neither.
    """
    contents = contents_of(files)
    if len(contents) < 3:
        raise ValueError(f"{len(contents)} pictures and passages of text are too few: give 3 at least")
    asked, order, rng = tuple(questions) or (QUESTION,), list(range(len(contents))), random.Random(0)
    whole = min(LEAVE + STAY, len(contents))
    while True:
        for start in range(0, len(order) - whole + 1, whole):
            drawn = [contents[i] for i in order[start : start + whole]]
            yield Document(drawn[: whole // 2], drawn[whole // 2 :], asked)
        rng.shuffle(order)


def contents_of(files: Sequence[Path]) -> list[Content]:
    """Pictures, and texts in passages, as chat content. Raises ValueError for a file that is neither."""
    return [content for file in files for content in _read(file)]


def passages(text: str) -> list[Content]:
    """A text in pieces of some ``PASSAGE`` characters, cut at empty lines."""
    pieces, held = list[str](), ""
    for paragraph in text.split("\n\n"):
        held = f"{held}\n\n{paragraph}" if held else paragraph
        while len(held) >= PASSAGE:
            pieces.append(held[: 2 * PASSAGE])
            held = held[2 * PASSAGE :]
    pieces += [held] if held else []
    return [[{"type": "text", "text": f"{piece.strip()}\n\n"}] for piece in pieces if piece.strip()]


def _read(file: Path) -> list[Content]:
    try:
        return passages(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        pass
    except OSError as error:
        raise ValueError(f"{quote(str(file))} cannot be read: {error.strerror}") from None
    try:
        with Image.open(file) as picture:
            return [[{"type": "image", "image": picture.convert("RGB")}, {"type": "text", "text": "\n"}]]
    except UnidentifiedImageError:
        raise ValueError(f"{quote(str(file))} is neither a picture nor a text in UTF-8") from None
