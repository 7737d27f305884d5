"""A frozen benchmark is what it was, or it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from kamera.errors import TaskDataError
from kamera.eval.reuse import Item, ReuseBench, freeze, load
from kamera.eval.reuse.frozen import FILE, check_picture
from kamera.eval.tasks.sample import Passage, Picture, TaskSample
from tests.eval.reuse.rig import small


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    return small(tmp_path_factory.mktemp("frozen") / "bench")


@pytest.fixture
def copied(frozen, tmp_path):
    folder = tmp_path / "bench"
    (folder / "media").mkdir(parents=True)
    for path in frozen.folder.rglob("*.*"):
        (folder / path.relative_to(frozen.folder)).write_bytes(path.read_bytes())
    return folder


def test_what_was_frozen_is_read_back(frozen, tmp_path):
    again = load(frozen.folder)
    assert again == frozen and again.items[0].sample.answer
    other = small(tmp_path / "again")
    assert other.digest == frozen.digest  # equal seeds, equal digests
    check_picture(again.items[0].sample.parts[0])
    with Image.open(again.items[0].sample.parts[0].source) as picture:
        assert picture.size[0] > 0


def test_every_live_part_is_read_back(frozen, tmp_path):
    item, shown = frozen.items[0], Image.new("RGB", (16, 16), (1, 2, 3))
    choices = (Picture(shown, True), Picture(shown.rotate(90), True, "\nB: "))
    live = (Passage("A: ", True), *choices)
    parts = item.sample.parts
    sample, window = replace(item.sample, parts=(*parts, *live)), tuple(range(len(parts)))
    item = replace(item, sample=sample, traces={"published": (window, window)})
    again = freeze([item], tmp_path, system=None, origin={}).items[0].sample.parts[len(parts) :]
    assert [(type(part), part.live) for part in again] == [(type(part), True) for part in live]
    assert again[0] == live[0] and again[2].caption == "\nB: "


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["items"][0]["sample"].update(answer="another"),
        lambda body: body["items"][0]["traces"]["slid"][0].reverse(),
        lambda body: body.update(system="You watch no camera."),
        lambda body: body["origin"].update(seed=7),
        lambda body: body["items"].clear(),
    ],
)
def test_a_changed_file_is_refused(copied, change):
    body = json.loads((copied / FILE).read_text())
    change(body)
    (copied / FILE).write_text(json.dumps(body))
    with pytest.raises(TaskDataError, match="changed after it was frozen"):
        load(copied)


def test_a_changed_or_missing_picture_is_refused(copied):
    content = load(copied).items[0].sample.parts[0]
    path = Path(content.source)
    check_picture(content)
    with Image.open(path) as picture:
        changed = picture.convert("RGB")
    changed.putpixel((0, 0), (1, 2, 3))
    changed.save(path)
    with pytest.raises(TaskDataError, match="picture was changed"):
        check_picture(content)
    with pytest.raises(TaskDataError, match="picture was changed"):
        list(ReuseBench().load(copied))
    path.unlink()
    with pytest.raises(TaskDataError, match="no such picture"):
        check_picture(content)


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "broken JSON"),
        ("{}", "not a kamera-reuse-benchmark"),
        ('{"format": "kamera-reuse-benchmark"}', "version"),
    ],
)
def test_other_files_are_refused(tmp_path, text, said):
    with pytest.raises(TaskDataError, match="no benchmark here"):
        load(tmp_path)
    (tmp_path / FILE).write_text(text)
    with pytest.raises(TaskDataError, match=said):
        load(tmp_path)


def test_items_that_break_a_promise_are_not_frozen(tmp_path, frozen):
    words, window = TaskSample("x", "t", (Passage("words"),) * 5, "q", "a"), (0, 1, 2, 3, 4)
    item = Item(words, {"published": (window,)})
    with pytest.raises(TaskDataError, match="0 visual units"):
        freeze([item], tmp_path / "a", system=None, origin={})
    shown = replace(words, parts=(Picture("a.png"),) * 5, others=(Picture("b.png"),))
    for windows, said in (
        (((0, 6), window), "no unit 6"),
        (((0, 0), window), "a unit twice"),
        ((window, (1, 0, 2, 3, 4)), "does not end in the published window"),
    ):
        with pytest.raises(TaskDataError, match=said):
            Item(shown, {"slid": windows}).check()
    with pytest.raises(TaskDataError, match="nothing to freeze"):
        freeze([], tmp_path / "b", system=None, origin={})
    with pytest.raises(TaskDataError, match="frozen here already"):
        freeze([item], frozen.folder, system=None, origin={})
