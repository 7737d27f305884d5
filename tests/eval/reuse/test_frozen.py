"""A frozen benchmark is what it was, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from kamera.errors import TaskDataError
from kamera.eval.reuse import ReuseBench, load
from kamera.eval.reuse.frozen import FILE, check_picture
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
