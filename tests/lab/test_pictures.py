"""The pictures of the documentation are those that the program draws."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lab.pictures import FOLDER, PICTURES, draw

pytestmark = pytest.mark.lab


def test_every_picture_is_the_one_that_is_drawn_and_none_is_left_over():
    assert {path.name for path in FOLDER.glob("*.svg")} == {f"{name}.svg" for name in PICTURES}
    for name, rows in PICTURES.items():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == draw(rows)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_whole_and_nothing_reaches_out_of_it(name):
    picture = ElementTree.fromstring(draw(PICTURES[name]))
    wide = float(picture.attrib["width"])
    for box in picture.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.get("x", 0)) + float(box.attrib["width"]) <= wide
