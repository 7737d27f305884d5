"""Pictures and clips as users keep them: upright, in the size asked for, or refused by name."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from kamera.content import Conversations, MediaLimits, load_image, read_video
from kamera.content.limits import fit
from kamera.content.video import load_clip
from kamera.engines.hf import HfEngine
from kamera.errors import UnreadableMedia
from tests.content.test_chunks import picture, token_counts, write_video
from tests.models import processors

ORIENTATION = 0x0112
UPRIGHT = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(processors.matching_model(), processors.picture_processor())


def photo(path, orientation: int):
    """A JPEG as a phone writes it: the sensor's rows, and how to hold it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    picture(48, 24).save(path, exif=exif, quality=95)
    return path


def pixels(image: Image.Image) -> list:
    return np.asarray(image).tolist()


# -- orientation -----------------------------------------------------------------------------------


@pytest.mark.few(7)
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_photo_enters_upright(backbone, tmp_path, orientation):
    path = photo(tmp_path / "phone.jpg", orientation)
    stored = Image.open(path)
    turn = UPRIGHT[orientation]
    sensor = Image.fromarray(np.asarray(stored.convert("RGB")))
    upright = sensor if turn is None else sensor.transpose(turn)
    forms = [
        path,
        stored,
        {"type": "image", "image": str(path)},
        {"type": "image", "image": path.read_bytes()},
    ]
    for form in forms:
        assert pixels(load_image(form)) == pixels(upright)
    want = backbone.chunk(upright)
    for form in forms:
        chunk = backbone.chunk(form)
        assert chunk.id == want.id
        assert torch.equal(chunk.inputs["pixel_values"], want.inputs["pixel_values"])
    assert torch.equal(
        backbone.chunk([stored, stored]).input_ids, backbone.chunk([upright, upright]).input_ids
    )


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"max_pixels": 16 * 16}, (16, 8)),
        ({"max_pixels": 32 * 16}, (32, 16)),
        ({"min_pixels": 2 * 48 * 24}, (72, 40)),
        ({"min_pixels": 2000, "max_pixels": 4000}, (64, 32)),
        ({"resized_height": 30, "resized_width": 10}, (8, 32)),
        ({"resized_height": 1, "resized_width": 1}, (16, 16)),
    ],
)
def test_a_picture_has_the_size_its_item_asks_for(backbone, options, size):
    image = picture(48, 24)
    chunk = backbone.chunk({"type": "image", "image": image, **options})
    width, height = size
    assert chunk.inputs["image_grid_thw"].tolist() == [[1, height // 4, width // 4]]
    assert token_counts(chunk) == (width // 8) * (height // 8)
    assert chunk.id == backbone.chunk(image.resize(size)).id
    media = Conversations(backbone.processor).media({"type": "image", "image": image, **options})
    assert torch.equal(media.inputs["pixel_values"], chunk.inputs["pixel_values"])


def test_sizes_are_those_of_qwen_vl_utils():
    """Its smart_resize, written out: `round`, `floor`, `ceil` to whole cells."""
    assert fit(280, 560, 28, 3136, 12845056) == (280, 560)
    assert fit(280, 560, 28, 3136, 28 * 28 * 16) == (56, 140)
    assert fit(20, 20, 28, 3136, 12845056) == (56, 56)
    assert fit(1080, 1920, 28, 100352, 602112) == (560, 1008)
    with pytest.raises(UnreadableMedia, match="strip"):
        fit(1, 201, 28, 3136, 12845056)


# -- large pictures --------------------------------------------------------------------------------


def smooth(width: int = 301, height: int = 199) -> Image.Image:
    """A photograph's kind of picture: neighbours are alike."""
    seed = np.random.default_rng(0).integers(0, 255, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(seed).resize((width, height))


def encoded(image: Image.Image, form: str, **options) -> bytes:
    into = io.BytesIO()
    image.save(into, form, **options)
    return into.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(form):
    data = encoded(smooth(), form)
    with pytest.raises(UnreadableMedia, match="301 x 199 pixels, more than 50000"):
        load_image(
            data[: len(data) // 2 if form in ("PNG", "GIF") else None], limits=MediaLimits(picture=50_000)
        )
    with pytest.raises(UnreadableMedia, match="bytes, more than 99"):
        load_image(data, limits=MediaLimits(file=99))
    with pytest.raises(UnreadableMedia, match=r"bytes has \d+ bytes, more than 99"):
        load_image(data, limits=MediaLimits(file=99))


# -- clips -----------------------------------------------------------------------------------------


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("options", "indices"),
    [
        ({"video_start": 0.5}, (3, 4, 5, 6, 7, 8, 9)),
        ({"video_end": 1.0}, (0, 1, 2, 3, 4, 5)),
        ({"video_start": 0.4, "video_end": 1.3}, (2, 3, 4, 5, 6)),
        ({"video_start": 0.4, "video_end": 1.3, "nframes": 2}, (2, 6)),
        ({"video_start": 1.0, "video_end": 99.0, "max_frames": 3}, (5, 7, 9)),
        ({"nframes": 4, "video_end": 1.3}, (0, 2, 4, 6)),
    ],
)
@pytest.mark.parametrize("source", ["file", "frames"])
def test_a_part_of_a_video_is_taken(backbone, tmp_path, options, indices, source):
    path = write_video(tmp_path / "clip.mp4")
    whole = read_video(path)
    item = {"type": "video", **options}
    item |= {"video": str(path)} if source == "file" else {"video": list(whole.frames), "fps": 5}
    clip = load_clip(item)
    assert clip.indices == indices
    assert clip.seconds == pytest.approx([whole.seconds[i] for i in indices])
    assert (clip.total_frames, clip.fps) == (10, 5)
    assert backbone.chunk(item).id == backbone.chunk([whole.frames[i] for i in indices]).id


@pytest.mark.parametrize("url", ["https://example.com/a", "s3://bucket/a"])
def test_a_url_is_named_and_not_fetched(backbone, url):
    for read in (read_video, load_image, lambda u: backbone.chunk({"type": "image", "url": u})):
        with pytest.raises(UnreadableMedia, match="is a url: Kamera fetches nothing"):
            read(url)


# -- tensors by hand -------------------------------------------------------------------------------
