"""Clips through the stock processor and its video path (needs torchvision; run with ``-m video``)."""

from __future__ import annotations

import importlib.util
import itertools
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

from kamera import ChunkStore, KameraWindow, ReusePolicy, read_video
from kamera.content import Clip, Conversations
from kamera.content.limits import pixel_bounds, size_of
from kamera.content.media import load_image
from kamera.engines.hf import HfEngine
from kamera.window import former_of, sequence_of
from tests.models import processors

pytestmark = [
    pytest.mark.video,
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision"),
]

SIDE, RATE, FRAMES = 32, 4, 8


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    pictures = processors.picture_processor()
    videos = Qwen2VLVideoProcessor(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 64 * 64 * FRAMES},
    )
    stock = Qwen2_5_VLProcessor(
        pictures.image_processor,
        processors.tokenizer(),
        videos,
        chat_template=processors.CHATML,
    )
    return HfEngine(processors.matching_model(), stock)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(RATE))
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        for i in range(FRAMES):
            shade = np.full((SIDE, SIDE, 3), 20 + 25 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


def test_a_video_file_is_one_clip_with_its_frames_times(backbone, clip):
    chunk = backbone.chunk({"type": "video", "video": clip})
    t, h, w = chunk.inputs["video_grid_thw"][0].tolist()
    assert (t, h, w) == (FRAMES // 2, SIDE // 4, SIDE // 4)
    assert int((chunk.input_ids == backbone.builder.video_token).sum()) == t * h * w // 4
    # two frames to a temporal patch, RATE frames a second
    assert chunk.inputs["second_per_grid_ts"].tolist() == pytest.approx([2 / RATE])
    assert not torch.equal(*[chunk.inputs["pixel_values_videos"][i] for i in (0, -1)])


def test_true_times_are_in_the_key(backbone):
    frames = tuple(Image.new("RGB", (SIDE, SIDE), (40 * i, 0, 0)) for i in range(4))
    even, late = (Clip(frames, (0, 1, 2, 3), times, 1.0, 4) for times in ((0, 1, 2, 3), (0, 0.1, 0.2, 3)))
    conversations = Conversations(backbone.processor)
    digests = [conversations.media({"type": "video", "video": clip}).digest for clip in (even, late, even)]
    assert digests[0] == digests[2] != digests[1]


def test_a_list_of_frames_equals_the_clip_of_their_file(backbone, clip):
    frames = list(read_video(clip).frames)
    item = {"type": "video", "video": frames, "fps": RATE}
    assert backbone.chunk(item).id == backbone.chunk({"type": "video", "video": clip}).id


def test_a_clip_moves_and_is_patched_like_any_chunk(backbone, clip):
    window = KameraWindow(
        backbone, ChunkStore.open("memory://"), "You watch.", policy=ReusePolicy(rank=512, forms="always")
    )
    picture = Image.new("RGB", (SIDE, SIDE), (200, 30, 30))
    ids = [window.append(c).slot.chunk_id for c in (picture, {"type": "video", "video": clip}, "that was it")]
    before = window.next_token_logits("what moved?")
    window.reorder([1, 0, 2])
    window.reorder([1, 0, 2])
    after = window.next_token_logits("what moved?")
    assert [s.chunk_id for s in window.slots] == ids
    assert float((after - before).norm() / before.norm()) <= 1e-4
    whole = backbone.positions(
        [former_of(window).anchor.input_ids, *[f.input_ids for f in window._state.encoded]],
        [{}, *[f.position_inputs for f in window._state.encoded]],
    )
    assert torch.equal(sequence_of(window).position_ids, whole)


@pytest.mark.parametrize(
    "options",
    [{"max_pixels": 28 * 28 * 16}, {"min_pixels": 10**6}, {"resized_height": 300, "resized_width": 90}],
)
def test_an_items_size_is_the_one_of_qwen_vl_utils(tmp_path, options):
    utils = pytest.importorskip("qwen_vl_utils")
    path = tmp_path / "wide.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (280, 560, 3), np.uint8)).save(path)
    item = {"type": "image", "image": str(path), **options}
    assert np.array_equal(np.asarray(load_image(item)), np.asarray(utils.fetch_image(item)))


@pytest.mark.parametrize("cell", [8, 28, 32])
def test_sizes_are_those_of_qwen_vl_utils(cell):
    utils = pytest.importorskip("qwen_vl_utils.vision_process")
    sides = [cell * 3 // 4, cell, 100, 333, 640, 1080, 4000]
    for height, width in itertools.product(sides, sides):
        if max(height, width) > 200 * min(height, width):
            continue  # refused
        for least, most in ((4, 16384), (128, 768), (16, 16), (200, 300)):
            bounds = {"min_pixels": least * cell**2, "max_pixels": most * cell**2}
            rows, columns = utils.smart_resize(height, width, cell, *bounds.values())
            if rows and columns:  # it gives a long strip no pixels at all
                assert size_of((width, height), bounds, "image", cell) == (columns, rows)
        rows, columns = utils.smart_resize(height, width, cell)
        asked = {"resized_height": height, "resized_width": width}
        assert (
            size_of((1, 1), asked, "image", cell) == size_of((1, 1), asked, "video", cell) == (columns, rows)
        )
    for kind, least, most in (
        ("image", utils.IMAGE_MIN_TOKEN_NUM, utils.IMAGE_MAX_TOKEN_NUM),
        ("video", utils.VIDEO_MIN_TOKEN_NUM, utils.VIDEO_MAX_TOKEN_NUM),
    ):
        assert pixel_bounds({}, kind, cell) == (least * cell**2, most * cell**2)
