"""Screens on the screen reader: an agent sees twelve, keeps three, looks back, and is asked about them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kamera.engines.hf import Backbone, HfEngine
from kamera.eval.demo import Demo
from kamera.eval.walk import Ask, walk

if TYPE_CHECKING:
    from PIL import Image

SYSTEM = "You answer questions about screens."

LABELS = """
Save Open Close Search Price Total Home File Edit View Help User Send Back Next Map Date Time Title Page
Photo Video Music Light Dark Mode Type Size Phone City Country Profile Sound Name Email Delete Add New
Print Copy Start Stop Play Share Login Sign Menu List Table Image
""".split()  # noqa: SIM905

COLOURS = {"red": (200, 20, 20), "blue": (20, 40, 210), "green": (10, 130, 30), "orange": (235, 120, 0)}
SIDE, SQUARE = 256, 32


class Thing(NamedTuple):
    """What a screen shows in a row: a word or a button in a colour, a checkbox, or a number, by its label."""

    kind: str
    label: str
    value: str

    def ask(self) -> Ask:
        """A plain question about it, and how its answer begins."""
        text = {
            "word": "What colour is the word {}?",
            "button": "What colour is the button {}?",
            "check": "Is {} on or off?",
            "number": "What number is {}?",
        }[self.kind].format(self.label)
        return Ask(text, text, self.value if self.kind == "number" else f" {self.value}")


def screens(count: int, seed: int = 0) -> list[tuple[Thing, ...]]:
    """So many screens (at most 12) of four things each, of each kind one; no label stands on two."""
    drawn = random.Random(seed)
    labels = iter(drawn.sample(LABELS, 4 * count))
    values = {"check": ["on", "off"], "number": [str(n) for n in range(10, 100)]}
    return [
        tuple(
            Thing(kind, next(labels), drawn.choice(values.get(kind, list(COLOURS))))
            for kind in drawn.sample(("word", "button", "check", "number"), 4)
        )
        for _ in range(count)
    ]


def drawn(things: tuple[Thing, ...]) -> Image.Image:
    """The picture of a screen, 256 × 256 pixels: a thing in every other row, as the reader knows them."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    canvas, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    canvas.fontmode = "L"
    for number, (kind, label, value) in enumerate(things):
        x, y = 3, 2 * number * SQUARE + SQUARE // 2
        ink, width = COLOURS.get(value, (0, 0, 0)), round(font.getlength(label))
        if kind == "button":
            right = x + SQUARE + width + 8
            canvas.rounded_rectangle((x, y - 11, right, y + 11), 4, fill=(225, 225, 228), outline=(120,) * 3)
            canvas.ellipse((x + 9, y - 5, x + 19, y + 5), fill=ink)
        elif kind == "check":
            box = x + width + 7
            canvas.rectangle((box, y - 6, box + 12, y + 6), fill=(255, 255, 255), outline=(90, 90, 90))
            if value == "on":
                canvas.line((box + 3, y, box + 5, y + 4, box + 10, y - 4), fill=(0, 90, 200), width=2)
        elif kind == "number":
            frame = x + 2 * SQUARE
            right = frame + round(font.getlength(value)) + 8
            canvas.rectangle((frame, y - 10, right, y + 10), fill=(255, 255, 255), outline=(140, 140, 140))
            canvas.text((frame + 4, y), value, fill=ink, font=font, anchor="lm")
        canvas.text((x + SQUARE * (kind == "button"), y), label, fill=ink, font=font, anchor="lm")
    return picture


def walk_screens(
    backbone: Backbone | HfEngine, *, keep: int = 3, count: int = 12, asked: int = 2
) -> Iterator[str | Demo]:
    """Walk a window of ``keep`` screens over ``count``; yields progress, then the table.

    After each operation ``asked`` things of every screen in view are asked for.
    """
    shown = screens(count)
    questions = {number: [thing.ask() for thing in things[:asked]] for number, things in enumerate(shown)}
    pictures = [drawn(things) for things in shown]
    yield from walk(
        backbone, pictures, questions, arrival="new screen", keep=keep, max_new_tokens=4, system=SYSTEM
    )
