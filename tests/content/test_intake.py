"""What a newcomer gives is taken for what it is, or refused by name: never for something else."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kamera import ChunkStore, KameraWindow
from kamera.content import load_image
from kamera.errors import ModalityNotSupported, UnreadableMedia
from kamera.reuse import Reuser
from kamera.window import search
from tests.content.templates import picture
from tests.content.test_chunks import write_video
from tests.sessions.rig import EXACT, seeing, session

GREEDY = {"max_new_tokens": 2, "do_sample": False}


def window() -> KameraWindow:
    return KameraWindow(seeing(), ChunkStore.open("memory://"), policy=EXACT)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "my shot.png"
    picture(3).save(path)
    return path


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


# -- strings that name a picture -------------------------------------------------------------------


def test_a_string_that_names_a_picture_is_that_picture(file, monkeypatch):
    wanted = seeing().chunk(picture(3)).id
    monkeypatch.chdir(file.parent)
    for name in (str(file), "my shot.png", "./my shot.png", file.as_uri(), f"file://{file}"):
        assert seeing().chunk(name).id == wanted, name
        assert window().append(name).slot.chunk_id == wanted, name
    assert seeing().chunk(["my shot.png", "what is it?"]).id == seeing().chunk([picture(3), "what is it?"]).id


def test_a_picture_is_known_without_a_suffix_if_its_path_is_one(file):
    bare = file.rename(file.with_name("shot"))
    assert seeing().chunk(str(bare)).id == seeing().chunk(picture(3)).id


def test_a_file_name_may_hold_any_space(file):
    """macOS writes a narrow one before PM."""
    odd = file.rename(file.with_name("shot at 1.02.03\u202fPM.png"))
    assert seeing().chunk(str(odd)).id == seeing().chunk(picture(3)).id
    assert seeing().chunk(f" {odd}\n").id == seeing().chunk(picture(3)).id


def test_a_pipe_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    for name in (str(tmp_path / "a.png"), tmp_path / "a.png"):
        with pytest.raises(UnreadableMedia, match=r"a\.png"):
            seeing().chunk(name)


def test_a_string_that_names_a_video_is_that_video(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    assert seeing().chunk(str(path)).id == seeing().chunk(path).id


def test_a_data_url_is_the_picture_in_it():
    url = "data:image/png;base64," + base64.b64encode(png(picture(3))).decode()
    assert seeing().chunk(url).id == seeing().chunk(picture(3)).id


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/rgb.png", "no image at '/no/such/rgb.png'"),
        ("rgb.JPEG", "no image at 'rgb.JPEG'"),
        ("./my shots/rgb.webp", "no image at"),
        ("C:\\shots\\rgb.png", "no image at"),
        ("file:///no/such.png", "no image at '/no/such.png'"),
        ("file:///no/such", "no image at '/no/such'"),
        ("/no/such/clip.mp4", "no video at '/no/such/clip.mp4'"),
        ("https://example.com/a.png", "fetches nothing"),
        ("http://example.com/a?size=3", "fetches nothing"),
        ("s3://bucket/a.png", "fetches nothing"),
        ("data:image/png;base64,AAAA", "cannot be read"),
    ],
)
def test_a_string_that_looks_like_a_picture_is_never_text(name, says):
    held = window()
    for take in (held.append, lambda given: held.insert(0, given), lambda given: search(held, given)):
        with pytest.raises(UnreadableMedia, match=says.replace("\\", ".")) as caught:
            take(name)
        assert "\n" not in str(caught.value)
        # the way to have it as text all the same
        assert '{"type": "text"' in str(caught.value) or name.startswith("data:")
    assert held.slots == ()


@pytest.mark.parametrize(
    "text",
    [
        "Look at rgb.png",
        "The file is\n/no/such/rgb.png",
        "rgb.png is black",
        "see https://example.com/a.png",
        "data: image of a cat",
        "and/or",
        "/etc/hostname",
        "/",
        "~",
        "v1.2",
        "a" * 10_000 + ".png and more",
        "\x00.png",
    ],
)
def test_other_text_is_text(text):
    ids = seeing().builder.format.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert seeing().chunk(text).input_ids.tolist() == ids


def test_text_of_a_message_or_of_a_text_item_names_no_file(file):
    """It may be a client's: what it spells is never opened."""
    said = seeing().builder.format.tokenizer(str(file), add_special_tokens=False)["input_ids"]
    for content in (
        {"type": "text", "text": str(file)},
        [{"type": "text", "text": str(file)}],
        {"role": "user", "content": str(file)},
        [{"role": "user", "content": [{"type": "text", "text": str(file)}]}],
    ):
        assert seeing().chunk(content).input_ids.tolist() == said
    chat = session(seeing())
    chat.send(str(file), **GREEDY)
    assert seeing().builder.format.tokenizer.decode(chat.prompt_ids).count(str(file)) == 1
    assert not any(segment.media for segment in chat.render().segments)


def test_strings_in_the_content_of_a_message_are_text_too(file):
    with_list = {"role": "user", "content": [str(file)]}
    assert not seeing().chunk(with_list).has_media


# -- every form of a picture, wherever pictures are -----------------------------------------------

GRAY = np.asarray(picture(3).convert("L"))
ALPHA = np.asarray(picture(3).convert("RGBA"))

FORMS: dict[str, tuple[Any, Image.Image]] = {
    "bytes": (png(picture(3)), picture(3)),
    "bytearray": (bytearray(png(picture(3))), picture(3)),
    "memoryview": (memoryview(png(picture(3))), picture(3)),
    "BytesIO": (io.BytesIO(png(picture(3))), picture(3)),
    "gray": (GRAY, Image.fromarray(GRAY)),
    "gray, one channel": (GRAY[..., None], Image.fromarray(GRAY)),
    "RGBA": (ALPHA, Image.fromarray(ALPHA)),
    "RGB": (np.asarray(picture(3)), picture(3)),
    "data url": ("data:image/png;base64," + base64.b64encode(png(picture(3))).decode(), picture(3)),
}


def part(source: Any) -> dict:
    return {"type": "image_url", "image_url": {"url": source, "detail": "high"}}


@pytest.mark.parametrize("form", FORMS)
def test_a_window_takes_a_picture_in_every_form(form):
    given, same = FORMS[form]
    wanted = seeing().chunk(same).id
    assert seeing().chunk(given).id == wanted
    assert seeing().chunk({"type": "image", "image": given}).id == wanted
    assert seeing().chunk({"image": given}).id == wanted
    assert seeing().chunk([given, "what?"]).id == seeing().chunk([same, "what?"]).id
    assert seeing().chunk({"role": "user", "content": [{"type": "image", "image": given}]}).id == wanted
    held = window()
    assert held.append(given).slot.chunk_id == wanted
    held.evict(0)
    assert held.recall(like=given).slot.chunk_id == wanted
    assert search(held, given)[0].chunk_id == wanted


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_takes_a_picture_in_every_form(form, tmp_path):
    given, same = FORMS[form]
    chats = []
    for source in (same, given):
        shown = [{"role": "user", "content": [{"type": "image", "image": source}]}]
        chat = session(seeing(), reuse=True)
        chat.send(shown, **GREEDY)
        chat.send("and now?", **GREEDY)  # the same object is read once more
        chats.append(chat)
    one, other = (chat.render().segment_ids() for chat in chats)
    assert one == other
    chats[1].save(tmp_path / "saved")
    reuser = Reuser(seeing(), ChunkStore.open("memory://"), EXACT)
    messages = [{"role": "user", "content": [{"type": "image", "image": given}]}, *chats[1].messages[1:2]]
    plan = reuser.prepare([*messages, {"role": "user", "content": "what?"}])
    assert any(admission.reason for admission in plan.admissions)


@pytest.mark.parametrize("form", ["bytes", "BytesIO", "data url"])
def test_openais_part_is_a_picture_in_a_window_and_in_a_conversation(form):
    given, same = FORMS[form]
    wanted = seeing().chunk(same).id
    for item in (part(given), {"type": "image_url", "image_url": given}, {"image_url": {"url": given}}):
        assert seeing().chunk(item).id == wanted
        assert seeing().chunk([item]).id == wanted
        assert window().append({"role": "user", "content": [item]}).slot.chunk_id == wanted
        rendered = []
        for one in (item, {"type": "image", "image": same}):
            chat = session(seeing())
            chat.send([{"role": "user", "content": [one]}], **GREEDY)
            rendered.append(chat.render().segment_ids())
        assert rendered[0] == rendered[1]


def test_openais_part_of_a_url_is_refused_by_name():
    for take in (window().append, lambda item: session(seeing()).send([{"role": "user", "content": [item]}])):
        with pytest.raises(UnreadableMedia, match="fetches nothing"):
            take(part("https://example.com/a.png"))


@pytest.mark.parametrize(
    "wrong", [{"url": None}, {}, None, 7, {"url": {"url": "x"}}, {"url": ["a.png"]}, {"url": ""}]
)
def test_an_openai_part_without_a_picture_is_named(wrong):
    item = {"type": "image_url", "image_url": wrong}
    for take in (window().append, lambda item: session(seeing()).send([{"role": "user", "content": [item]}])):
        with pytest.raises(UnreadableMedia) as caught:
            take(item)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["bytes", "BytesIO", "gray"])
def test_a_picture_for_the_content_of_a_message_is_refused(form):
    """A template could write its repr as text."""
    chat = session(seeing())
    with pytest.raises(ModalityNotSupported, match="is a picture: give a list of items"):
        chat.send({"role": "user", "content": FORMS[form][0]}, **GREEDY)
    assert chat.messages == []


def test_a_list_of_pictures_in_memory_is_a_clip():
    frames = [picture(i) for i in range(3)]
    wanted = seeing().chunk(frames).id
    assert seeing().chunk([png(f) for f in frames]).id == wanted
    assert seeing().chunk([io.BytesIO(png(f)) for f in frames]).id == wanted


def test_a_file_that_is_read_stays_where_it_was():
    data = io.BytesIO(png(picture(3)))
    data.seek(5)
    load_image(data)
    assert data.tell() == 5


def test_a_stream_that_is_over_or_closed_is_named():
    closed = io.BytesIO(png(picture(3)))
    closed.close()
    for stream in (closed, io.StringIO("x"), io.BytesIO()):
        with pytest.raises(UnreadableMedia) as caught:
            load_image(stream)
        assert "\n" not in str(caught.value)


# -- depth -----------------------------------------------------------------------------------------

RAMP = np.linspace(0, 65535, 48 * 32).reshape(32, 48).astype(np.uint16)
EIGHT = np.rint(RAMP / 257).astype(np.uint8)


def saved(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def test_sixteen_bits_of_gray_keep_their_range(tmp_path):
    image = Image.fromarray(RAMP)
    assert image.mode == "I;16"
    wide = Image.fromarray(RAMP.astype(np.int32))
    assert wide.mode == "I"
    forms = [image, wide, saved(image, tmp_path / "a.png"), saved(image, tmp_path / "a.tiff")]
    for form in [*forms, saved(wide, tmp_path / "b.tiff")]:
        found = np.asarray(load_image(form))
        assert np.array_equal(found[..., 0], EIGHT)
        assert (found == found[..., :1]).all()


def test_integers_of_eight_bits_stay_as_they_are():
    image = Image.fromarray(EIGHT.astype(np.int32))
    assert np.array_equal(np.asarray(load_image(image))[..., 0], EIGHT)


def test_floats_are_shares_of_white(tmp_path):
    image = Image.fromarray((RAMP / 65535).astype(np.float32))
    for form in (image, saved(image, tmp_path / "a.tiff")):
        assert np.array_equal(np.asarray(load_image(form))[..., 0], EIGHT)


@pytest.mark.parametrize("values", [(-0.1, 1.0), (0.0, 255.0), (0.0, np.nan), (0.0, np.inf)])
def test_floats_of_another_range_are_refused(tmp_path, values):
    image = Image.fromarray(np.array([values], np.float32))
    with pytest.raises(UnreadableMedia, match=r"floats from .* give 0 to 1, or 8 bits"):
        load_image(saved(image, tmp_path / "a.tiff"))


@pytest.mark.parametrize("values", [(-1, 5), (0, 65536)])
def test_integers_of_another_range_are_refused(values):
    with pytest.raises(UnreadableMedia, match=r"integers from .* give 0 to 65535, or 8 bits"):
        load_image(Image.fromarray(np.array([values], np.int32)))
