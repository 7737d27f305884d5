"""Pictures for Kimi-K2.5 without torchvision, which the stock picture processor needs.

Settings, file on disk and patches equal the stock ones for pictures that need no resizing. Pillow resizes
a picture above the model's budget, so its pixels differ from torchvision's in rounding, and so does the
chunk's id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import AutoTokenizer
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.processing_utils import ImagesKwargs
from transformers.utils.constants import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD

from kamera.content.without_video import image_only

STOCK = "Kimi_K25ImageProcessor"


class KimiPicturesKwargs(ImagesKwargs, total=False):
    """Arguments of the stock processor in addition to the common ones."""

    max_patches: int
    patch_size: int
    merge_size: int


class KimiPictures(PilBackend):
    """Pictures to `pixel_values` `[patches, 3, patch, patch]`, row by row, and `image_grid_thw`."""

    do_resize = True
    resample = PILImageResampling.BICUBIC
    size: ClassVar[dict[str, int]] = {"max_height": 512, "max_width": 512}
    max_patches = 16384
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_convert_rgb = True
    patch_size = 14
    merge_size = 2
    valid_kwargs = KimiPicturesKwargs
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def to_dict(self) -> dict[str, Any]:
        """The settings under the stock class's name, so that either class loads them."""
        return {**super().to_dict(), "image_processor_type": STOCK}

    def _preprocess(self, images: Sequence[np.ndarray], *_: Any, **settings: Any) -> BatchFeature:
        patch, merge = settings["patch_size"], settings["merge_size"]
        pixels, grids = [], []
        for image in images:
            if settings["do_resize"]:
                image = self._fit(image, settings)
            if settings["do_rescale"]:
                image = self.rescale(image, settings["rescale_factor"])
            if settings["do_normalize"]:
                image = self.normalize(image, settings["image_mean"], settings["image_std"])
            rows, columns = image.shape[1] // patch, image.shape[2] // patch
            if rows % merge or columns % merge:
                raise ValueError(
                    f"a picture of {image.shape[2]} x {image.shape[1]} pixels is not a multiple of "
                    f"{patch * merge}: leave do_resize on"
                )
            grid = np.asarray(image, dtype=np.float32).reshape(3, rows, patch, columns, patch)
            pixels.append(grid.transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3, patch, patch))
            grids.append((1, rows, columns))
        data = {"pixel_values": np.concatenate(pixels), "image_grid_thw": np.array(grids)}
        return BatchFeature(data=data, tensor_type=settings["return_tensors"])

    def _fit(self, image: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
        """Shrink to the patch budget, then pad with black to whole merge blocks."""
        _, height, width = image.shape
        limit = settings["size"].max_height * settings["patch_size"]
        height_to, width_to = fit(height, width, settings["patch_size"], settings["max_patches"], limit)
        if (height_to, width_to) != (height, width):
            size = SizeDict(height=height_to, width=width_to)
            image = self.resize(image, size=size, resample=settings["resample"])
        block = settings["patch_size"] * settings["merge_size"]
        padding = [(0, 0), (0, -height_to % block), (0, -width_to % block)]
        return np.pad(image, padding)


def fit(height: int, width: int, patch: int, max_patches: int, limit: int) -> tuple[int, int]:
    """The largest size of the same shape within the patch budget and `limit` pixels a side."""
    count = max(1.0, height // patch) * max(1.0, width // patch)
    scale = min(1.0, math.sqrt(max_patches / count), limit / height, limit / width)
    return min(limit, max(1, int(height * scale))), min(limit, max(1, int(width * scale)))


KimiPictureProcessor = image_only(Kimi_K25Processor)
"""`Kimi_K25Processor` without its video part; it refuses a video by name."""


def load_kimi_pictures(name: str | Path) -> Any:
    """The picture processor of a model directory or hub name."""
    settings, _ = KimiPictures.get_image_processor_dict(str(name))
    tokenizer = AutoTokenizer.from_pretrained(str(name))
    return KimiPictureProcessor(
        KimiPictures.from_dict(settings), tokenizer, chat_template=tokenizer.chat_template
    )
