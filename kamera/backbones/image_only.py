"""Qwen processors for pictures and text where there is no torchvision.

The stock classes insist on a video processor, and every video processor of transformers needs
torchvision; without it `AutoProcessor` hands back the bare tokenizer, without a word. Pictures need
Pillow only, so these models can still see: a clip's frames become pictures.
"""

from __future__ import annotations

from typing import Any

from kamera.errors import ModalityNotSupported

_PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
}


def load_image_only(name: str, model_type: str) -> Any | None:
    """A processor without a video part for a Qwen vision model, or None for another family."""
    if model_type not in _PROCESSORS:
        return None
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.processing_utils import ProcessorMixin

    stock: Any = getattr(transformers, _PROCESSORS[model_type])

    def __init__(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = map(
            tokenizer.convert_tokens_to_ids, (self.image_token, self.video_token)
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def __call__(self: Any, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> Any:
        if videos is not None:
            raise ModalityNotSupported(
                "videos need torchvision's video processors: install a torchvision that fits torch, or "
                "give the frames as pictures"
            )
        return stock.__call__(self, images=images, text=text, **kwargs)

    image_only = type(f"ImageOnly{stock.__name__}", (stock,), {"__init__": __init__, "__call__": __call__})
    tokenizer = AutoTokenizer.from_pretrained(name)
    return image_only(
        AutoImageProcessor.from_pretrained(name), tokenizer, chat_template=tokenizer.chat_template
    )
