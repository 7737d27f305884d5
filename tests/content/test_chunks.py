"""Content to chunks: every form users have it in, and a named error for every form they should not."""

from __future__ import annotations

import av
import numpy as np
import pytest
import torch
from PIL import Image

from kamera.content import read_video
from kamera.engines.hf import HfEngine, forwards
from kamera.errors import (
    EmptyChunk,
    IncompatibleChunk,
    UnreadableMedia,
)
from tests.models import processors, samples, tiny


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(processors.matching_model(), processors.picture_processor())


def picture(width: int = 32, height: int = 16, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_video(path, frames: int = 10, rate: int = 5):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for i in range(frames):
            shade = np.full((16, 32, 3), 20 * i, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        container.mux(stream.encode())
    return path


def token_counts(chunk, token: str = "<|image_pad|>") -> int:
    return int((chunk.input_ids == processors.SPECIAL.index(token)).sum())


def test_text_is_its_tokens_without_special_ones(backbone):
    chunk = backbone.chunk("hello")
    assert backbone.builder.detokenize(chunk.input_ids) == "hello"
    assert chunk.num_tokens == 5
    assert not chunk.has_media
    assert chunk.label == "hello"


def test_a_picture_is_one_chunk_from_every_kind_of_source(backbone, tmp_path):
    image = picture()
    path = tmp_path / "frame.png"
    image.save(path)
    forms = [
        image,
        np.asarray(image),
        path,
        {"type": "image", "image": image},
        {"type": "image", "path": str(path)},
        {"image": f"file://{path}"},
        [{"type": "image", "url": str(path)}],
        {"role": "user", "content": [{"type": "image", "image": np.asarray(image)}]},
    ]
    chunks = [backbone.chunk(form) for form in forms]
    assert len({c.id for c in chunks}) == 1
    assert token_counts(chunks[0]) == (32 // 8) * (16 // 8)
    assert chunks[0].has_media
    assert backbone.chunk(picture(seed=1)).id != chunks[0].id


def test_a_picture_is_wrapped_as_the_template_wraps_it(backbone):
    chunk = backbone.chunk([{"type": "text", "text": "a"}, {"type": "image", "image": picture()}, "b"])
    names = [processors.SPECIAL[i] if i < len(processors.SPECIAL) else "." for i in chunk.input_ids.tolist()]
    want = [".", "<|vision_start|>", *["<|image_pad|>"] * 8, "<|vision_end|>", "."]
    assert names == want
    assert chunk.inputs["mm_token_type_ids"].tolist() == [0, 0, *[1] * 8, 0, 0]
    encoded = backbone.encode(chunk)
    positions = backbone.positions([chunk.input_ids], [chunk.position_inputs()])
    kv, _ = forwards.run(backbone, encoded, positions)
    assert kv[0]["k"].shape[1] == chunk.num_tokens


def test_sampled_frames_are_the_ones_of_the_whole_decode(tmp_path):
    path = write_video(tmp_path / "clip.mp4")
    whole = read_video(path)
    for options, indices in (
        ({"num_frames": 3}, (0, 4, 9)),
        ({"fps": 2.5}, (0, 2, 4, 7, 9)),
        ({"fps": 100.0}, tuple(range(10))),
        ({"max_frames": 2}, (0, 9)),
        ({"num_frames": 1}, (0,)),
    ):
        clip = read_video(path, **options)
        assert clip.indices == indices
        assert clip.seconds == tuple(whole.seconds[i] for i in indices)
        for i, frame in zip(indices, clip.frames, strict=True):
            assert np.array_equal(np.asarray(frame), np.asarray(whole.frames[i]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (3, "int is not content"),
        (b"ab", "2 bytes cannot be read as an image"),
        (None, "NoneType is not content"),
        ({"type": "audio", "audio": "x"}, "is audio, of which Kamera keeps no KV"),
        ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, "is audio"),
        ({"type": "text", "text": 3}, "none of text, image, video"),
        ({"type": "image"}, "NoneType is not an image"),
        ({"type": "video"}, "NoneType is not a video"),
        ({"type": "video", "video": []}, "no frames"),
        ({"type": "image", "image": "/nowhere/x.png"}, "no image at '/nowhere/x.png'"),
        ({"type": "video", "video": "/nowhere/x.mp4"}, "no video at '/nowhere/x.mp4'"),
        (np.zeros((4, 4, 2), np.uint8), r"array of shape \(4, 4, 2\)"),
        (np.zeros((0, 4), np.uint8), "array of shape"),
        (np.zeros((4, 4, 3), np.float32), "float32 is not a picture"),
    ],
)
def test_unreadable_content_is_named(backbone, content, message):
    with pytest.raises(UnreadableMedia, match=message):
        backbone.chunk(content)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], EmptyChunk, "no tokens"),
        ([1, 160], ValueError, "token id 160 is outside the vocabulary of 160"),
        ([1, -1], ValueError, "token id -1 is outside"),
        ([0.5], ValueError, "integer ids"),
        ([[1, 2], [3, 4]], ValueError, r"shape \(2, 2\)"),
    ],
)
def test_token_ids_that_are_none_are_refused(ids, error, message):
    with pytest.raises(error, match=message):
        tiny.backbone("qwen2_5_vl").chunk_from_tensors(torch.tensor(ids))


def test_pixels_that_do_not_fit_the_tokens_are_refused_by_name():
    b = tiny.backbone("qwen2_5_vl")
    given = samples.sample("qwen2_5_vl")
    without = given.input_ids[given.input_ids != tiny.IMAGE]
    twice = torch.cat([given.input_ids, given.input_ids])
    for ids in (without, twice):
        with pytest.raises(IncompatibleChunk, match=r"pixel_values|image_grid_thw"):
            b.encode(b.chunk_from_tensors(ids, **given.vision_inputs))
