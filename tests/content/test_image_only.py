"""A family whose processor asks for torchvision takes pictures without it, or says what it lacks."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kamera.content.template import ChatTemplate
from kamera.engines.hf.load import load_processor
from kamera.errors import ModalityNotSupported
from tests.models import families, tiny

CELLS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
SQUARE = {"height": 16, "width": 16}
TILES: dict[str, Any] = {"size": SQUARE, "crop_to_patches": True, "max_patches": 4}


class Folder(NamedTuple):
    """What a model's folder says of its processor."""

    stock: str
    pictures: tuple[str, str, dict[str, Any]]
    tokens: dict[str, str]
    options: dict[str, Any]


def _pair(image: str, video: str, **more: str) -> dict[str, str]:
    return {"image_token": image, "video_token": video, **more}


PADS = _pair("<|image_pad|>", "<|video_pad|>")
GLM = _pair("<|image|>", "<|video|>")
ERNIE = _pair(
    "<|IMAGE_PLACEHOLDER|>",
    "<|VIDEO_PLACEHOLDER|>",
    image_start_token="<|IMAGE_START|>",
    image_end_token="<|IMAGE_END|>",
    video_start_token="<|VIDEO_START|>",
    video_end_token="<|VIDEO_END|>",
)
INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
PINS = [[16, 16], [16, 32], [32, 16], [32, 32]]

FOLDERS = {
    "qwen2_vl": Folder("Qwen2VLProcessor", ("qwen2_vl", "Qwen2VL", CELLS), PADS, {}),
    "qwen2_5_vl": Folder("Qwen2_5_VLProcessor", ("qwen2_vl", "Qwen2VL", CELLS), PADS, {}),
    "qwen3_vl": Folder("Qwen3VLProcessor", ("qwen2_vl", "Qwen2VL", CELLS), PADS, {}),
    "glm4v": Folder("Glm4vProcessor", ("glm4v", "Glm4v", CELLS), GLM, {}),
    "glm46v": Folder("Glm46VProcessor", ("glm46v", "Glm46V", CELLS), GLM, {}),
    "video_llama_3": Folder("VideoLlama3Processor", ("video_llama_3", "VideoLlama3", CELLS), PADS, {}),
    "ernie": Folder("Ernie4_5_VLMoeProcessor", ("ernie4_5_vl_moe", "Ernie4_5_VLMoe", CELLS), ERNIE, {}),
    "internvl": Folder("InternVLProcessor", ("got_ocr2", "GotOcr2", TILES), INTERN, {"image_seq_length": 4}),
    "llava_onevision": Folder(
        "LlavaOnevisionProcessor",
        ("llava_onevision", "LlavaOnevision", {"size": SQUARE, "image_grid_pinpoints": PINS}),
        _pair("<image>", "<video>"),
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": Folder(
        "PixtralProcessor",
        ("pixtral", "Pixtral", {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}}),
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
}


def pictures_of(folder: Folder) -> Any:
    kind, name, options = folder.pictures
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    return getattr(module, f"{name}ImageProcessorPil")(**options)


def save(model: str, folder: Folder, path: Path) -> Path:
    """A folder as the hub has it, without the model's weights."""
    special = ["<pad>", "<bos>", "<|im_end|>", "<|im_start|>", *folder.tokens.values()]
    image = next(iter(folder.tokens.values()))
    words = families.tokenizer(special, families.chatml(image), **folder.tokens)
    tiny.build(model).config.save_pretrained(path)
    words.save_pretrained(path)
    settings = {"processor_class": folder.stock, "image_processor": pictures_of(folder).to_dict()}
    (path / "processor_config.json").write_text(json.dumps({**settings, **folder.options}))
    return path


@pytest.mark.few(4)
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="the stock processors are there"
)
@pytest.mark.parametrize("model", FOLDERS)
def test_a_family_takes_pictures_from_its_folder(model, tmp_path):
    folder = FOLDERS[model]
    processor = load_processor(save(model, folder, tmp_path))
    assert type(processor).__name__ == f"ImageOnly{folder.stock}"
    picture = families.picture(48, 32)
    made = processor(images=[picture], text=[f"{processor.image_token}x"], return_tensors="pt")
    pixels = pictures_of(folder)([picture], return_tensors="pt")["pixel_values"]
    assert torch.equal(made["pixel_values"], pixels)
    assert int((made["input_ids"] == processor.image_token_id).sum()) > 1
    template = ChatTemplate(processor)
    assert template.kinds == ("image",) and template.has_template
    clip = [{"role": "user", "content": [{"type": "video", "video": [picture]}]}]
    with pytest.raises(ModalityNotSupported, match=r"holds video: .*a torchvision"):
        template.check(clip)
    if "video_token" in folder.tokens:
        with pytest.raises(ModalityNotSupported, match="pictures, not videos"):
            processor(text=[processor.video_token])
