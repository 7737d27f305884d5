"""Kimi's pictures through Pillow: the patches of the stock processor, videos refused by name."""

import numpy as np
import pytest
import torch
from PIL import Image

from kamera.content.kimi_pictures import KimiPictureProcessor, KimiPictures, fit
from kamera.errors import ModalityNotSupported
from tests.models.processors import tokenizer


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def patches_one_by_one(image, patch, merge, mean, std):
    """Pad to whole merge blocks with black, normalise, cut: row by row."""
    pixels = np.asarray(image).transpose(2, 0, 1)
    block = patch * merge
    pads = [(0, -side % block) for side in pixels.shape[1:]]
    pixels = np.pad(pixels, [(0, 0), *pads]) / 255
    pixels = (pixels - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    cut = [
        pixels[:, row : row + patch, column : column + patch]
        for row in range(0, pixels.shape[1], patch)
        for column in range(0, pixels.shape[2], patch)
    ]
    return np.stack(cut)


@pytest.mark.parametrize(("width", "height"), [(32, 32), (40, 24), (17, 49)])
def test_patches_are_those_of_a_slow_cutter(width, height):
    pictures = KimiPictures(patch_size=8)
    image = picture(width, height)
    got = pictures([image], return_tensors="pt")
    want = patches_one_by_one(image, 8, 2, pictures.image_mean, pictures.image_std)
    assert np.abs(got["pixel_values"].numpy() - want).max() < 1e-5
    rows, columns = (-(-side // 16) * 2 for side in (height, width))
    assert got["image_grid_thw"].tolist() == [[1, rows, columns]]


def test_a_picture_above_the_budget_shrinks_and_keeps_its_shape():
    height, width = fit(1000, 500, 10, 200, 10**6)
    assert (height // 10) * (width // 10) <= 200 and abs(height / width - 2) < 0.05
    assert fit(100, 100, 10, 200, 10**6) == (100, 100), "never enlarged"
    assert max(fit(100, 1000, 10, 10**6, 300)) <= 300
    grid = KimiPictures(patch_size=8, max_patches=16)([picture(128, 64)], return_tensors="pt")[
        "image_grid_thw"
    ]
    assert grid.tolist() == [[1, 4, 6]], "22 x 45 pixels, padded to whole blocks"


def test_a_video_is_refused_by_name():
    words = tokenizer()
    words.add_special_tokens(
        {"additional_special_tokens": ["<|media_pad|>", "<|kimi_k25_video_placeholder|>"]}
    )
    processor = KimiPictureProcessor(KimiPictures(patch_size=8), words)
    shown = processor(images=[picture(32, 32)], text="<|media_pad|>", return_tensors="pt")
    assert (shown["input_ids"] == processor.image_token_id).sum() == 4
    with pytest.raises(ModalityNotSupported, match="not videos"):
        processor(text="<|kimi_k25_video_placeholder|>")


@pytest.mark.video
@pytest.mark.parametrize(("width", "height"), [(32, 32), (40, 24), (17, 49)])
def test_patches_are_those_of_the_stock_processor(width, height):
    pytest.importorskip("torchvision")
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    image = picture(width, height)
    stock = Kimi_K25ImageProcessor(patch_size=8)([image], return_tensors="pt")
    ours = KimiPictures(patch_size=8)([image], return_tensors="pt")
    assert torch.equal(stock["image_grid_thw"], ours["image_grid_thw"])
    assert (stock["pixel_values"] - ours["pixel_values"]).abs().max() < 1e-5
