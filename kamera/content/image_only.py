"""Processors for pictures and text without torchvision.

The stock classes require a video processor, and every video processor of transformers needs torchvision;
without it `AutoProcessor` silently returns the bare tokenizer. Pictures need Pillow only, so these models
still accept them: a clip's frames become pictures.
"""

from __future__ import annotations

import functools
from typing import Any

from kamera.errors import ModalityNotSupported

_PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
}


def load_image_only(name: str, model_type: str) -> Any | None:
    """A processor without a video part for a Qwen or Kimi vision model, or None for another family."""
    if model_type == "kimi_k25":
        from kamera.content.kimi_pictures import load_kimi_pictures

        return load_kimi_pictures(name)
    if model_type not in _PROCESSORS:
        return None
    import transformers

    stock = getattr(transformers, _PROCESSORS[model_type])
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    # Pillow's resize even with torchvision: the two differ in rounding, and with them the chunks' ids
    pictures = transformers.AutoImageProcessor.from_pretrained(name, backend="pil")
    return image_only(stock)(pictures, tokenizer, chat_template=tokenizer.chat_template)


@functools.cache
def image_only(stock: Any, image: str = "<|image_pad|>", video: str = "<|video_pad|>") -> Any:
    """The class of a Qwen or Kimi processor without its video part; ``image``, ``video`` are placeholders.

    It refuses a video, and a video placeholder in the text, which the stock class would silently leave at
    one token.
    """
    from transformers.processing_utils import ProcessorMixin

    def __init__(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any
    ) -> None:
        self.image_token, self.video_token = image, video
        self.image_token_id, self.video_token_id = map(
            tokenizer.convert_tokens_to_ids, (self.image_token, self.video_token)
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def __call__(self: Any, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> Any:
        texts = [text] if isinstance(text, str) else (text or [])
        if videos is not None or any(self.video_token in str(t) for t in texts):
            raise ModalityNotSupported(
                "this processor takes pictures, not videos: give the frames as pictures (kamera.read_video), "
                "or install a torchvision that fits torch for the model's own video processor"
            )
        return stock.__call__(self, images=images, text=text, **kwargs)

    return type(f"ImageOnly{stock.__name__}", (stock,), {"__init__": __init__, "__call__": __call__})
