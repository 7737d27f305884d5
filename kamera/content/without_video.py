"""A stock processor's class without its video part."""

from __future__ import annotations

import functools
from typing import Any

from kamera.errors import ModalityNotSupported

_NO_VIDEOS = (
    "this processor takes pictures, not videos: give the frames as pictures (kamera.read_video), or install "
    "a torchvision that fits torch for the model's own video processor"
)


@functools.cache
def image_only(stock: Any) -> Any:
    """The class of a stock processor without its video part.

    It refuses a video, and a video placeholder in the text, which the stock class would silently leave at
    one token.
    """
    from transformers.processing_utils import ProcessorMixin

    names = stock.get_attributes()

    class WithoutVideo(ProcessorMixin):
        """Stands behind the stock class, which hands its parts on by their order."""

        def __init__(self, *parts: Any, **options: Any) -> None:
            options |= dict(zip(names, parts, strict=False))
            options.pop("video_processor", None)
            super().__init__(**options)

    def __init__(
        self: Any,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: Any = None,
        **options: Any,
    ) -> None:
        parts = {"image_processor": image_processor, "tokenizer": tokenizer, **options}
        if "video_processor" in names:
            parts["video_processor"] = None
        stock.__init__(self, **parts, chat_template=chat_template)

    def __call__(self: Any, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> Any:
        texts, token = [text] if isinstance(text, str) else (text or []), getattr(self, "video_token", None)
        if videos is not None or (token and any(token in str(t) for t in texts)):
            raise ModalityNotSupported(_NO_VIDEOS)
        return stock.__call__(self, images=images, text=text, **kwargs)

    entries = {
        "__init__": __init__,
        "__call__": __call__,
        "get_attributes": classmethod(lambda cls: [n for n in names if n != "video_processor"]),
        "lacks": {"video": _NO_VIDEOS},
    }
    return type(f"ImageOnly{stock.__name__}", (stock, WithoutVideo), entries)
