"""Chunk building: content in any form a user has it in, to token ids and model inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from kamera.backbones.chunk import TOKEN_TYPES, Chunk
from kamera.backbones.media import VIDEO_SUFFIXES, Clip, load_clip, load_image
from kamera.backbones.probe import find_vision_towers
from kamera.backbones.prompt import PromptFormat
from kamera.errors import EmptyChunk, ModalityNotSupported, ProcessorRequired, UnreadableMedia
from kamera.ops.digest import chunk_id

Content = Any
"""A string, a picture, a path, frames, one chat content item, or a list of items."""


class ChunkBuilder:
    """Turns content into chunks for one model and processor."""

    def __init__(self, model: nn.Module, processor: Any | None) -> None:
        self.model = model
        self.format = None if processor is None else PromptFormat(processor)
        forward: Any = model.forward
        self.accepted = [
            n
            for n, p in inspect.signature(forward).parameters.items()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        self.takes_pixels = bool(find_vision_towers(model)) and "pixel_values" in self.accepted
        config: Any = model.config
        self.image_token = _first(config, "image_token_id", "image_token_index")
        self.video_token = _first(config, "video_token_id", "video_token_index")

    @property
    def vision_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens in whose places picture and clip features stand."""
        return tuple(token for token in (self.image_token, self.video_token) if token is not None)

    def from_content(self, content: Content, fingerprint: str) -> Chunk:
        """Build a chunk from chat content, an image, frames, a video file or text."""
        items = self._items(content)
        if not items:
            raise EmptyChunk(f"content {content!r} holds nothing: give text, an image or a video")
        if self.format is None:
            raise ProcessorRequired(
                "this backbone has no processor, so content cannot be tokenised: pass one "
                "(Backbone(model, processor)) or use chunk_from_tensors"
            )
        media = [i["type"] for i in items if i["type"] != "text"]
        if media and not (self.takes_pixels and self.format.takes_images):
            raise ModalityNotSupported(
                f"{type(self.model).__name__} with {type(self.format.processor).__name__} takes text "
                f"only, the content holds {sorted(set(media))}: use a vision-language backbone"
            )
        if "video" in media and not self.format.takes_videos:
            items = [part for item in items for part in _as_images(item)]
        return self._process(items, fingerprint)

    def from_tensors(
        self, input_ids: Any, inputs: Mapping[str, Any], fingerprint: str, label: str = ""
    ) -> Chunk:
        """Build a chunk from token ids ``[tokens]`` (or ``[1, tokens]``) and the model's own inputs."""
        ids = torch.as_tensor(input_ids)
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.numel() == 0:
            raise EmptyChunk("a chunk of no tokens: give at least one token id")
        if ids.dim() != 1 or ids.is_floating_point():
            raise ValueError(f"input_ids of shape {tuple(ids.shape)}, {ids.dtype}: give integer ids [tokens]")
        # the id is a digest: what is digested must not change under a caller's later write
        ids = ids.to(device="cpu", dtype=torch.int64, copy=True)
        size = self.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"token id {int(ids.min()) if int(ids.min()) < 0 else int(ids.max())} is outside the "
                f"vocabulary of {size}: tokenise with this backbone's tokenizer"
            )
        tensors: dict[str, torch.Tensor] = {}
        for name, value in inputs.items():
            if value is None or name == "attention_mask":
                continue
            if name not in self.accepted:
                raise ModalityNotSupported(
                    f"{type(self.model).__name__} takes no {name!r}; it takes "
                    f"{[n for n in self.accepted if 'pixel' in n or 'grid' in n] or 'text only'}"
                )
            tensor = torch.as_tensor(value).detach().to("cpu", copy=True)
            if name in TOKEN_TYPES:
                tensor = tensor.reshape(-1).to(torch.int64)
                if tensor.shape != ids.shape:
                    raise ValueError(f"{name} has {tensor.shape[0]} entries for {ids.shape[0]} tokens")
            tensors[name] = tensor
        tensors.update(self._token_types(ids, tensors))
        return Chunk(chunk_id(ids, tensors), ids, tensors, fingerprint, label)

    def tokenize(self, text: str, *, special: bool = False) -> torch.Tensor:
        """Token ids of ``text``, int64 ``[tokens]``; ``special`` lets the tokenizer add its BOS."""
        if self.format is None:
            raise ProcessorRequired(
                f"this backbone has no processor to tokenise {text[:40]!r}: pass token ids, or "
                "Backbone(model, processor)"
            )
        ids = self.format.tokenizer(text, add_special_tokens=special)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def _token_types(self, ids: torch.Tensor, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = [n for n in TOKEN_TYPES if n in self.accepted and n not in given]
        has_media = any(n.startswith("pixel_values") for n in given)
        if not wanted or not has_media:
            return {}
        kinds = torch.zeros_like(ids)
        if self.image_token is not None:
            kinds[ids == self.image_token] = 1
        if self.video_token is not None:
            kinds[ids == self.video_token] = 2
        return {name: kinds.clone() for name in wanted}

    def _items(self, content: Content) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        if isinstance(content, Path):
            kind = "video" if content.suffix.lower() in VIDEO_SUFFIXES else "image"
            return [{"type": kind, kind: content}]
        if isinstance(content, Image.Image):
            return [{"type": "image", "image": content}]
        if isinstance(content, np.ndarray):
            kind = "video" if content.ndim == 4 else "image"
            return [{"type": kind, kind: content}]
        if isinstance(content, Clip):
            return [{"type": "video", "video": content}]
        if isinstance(content, Mapping):
            if "role" in content:  # a whole chat message: its content is the chunk
                return self._items(content.get("content"))
            return [_checked(content)]
        if isinstance(content, Sequence):
            if content and all(isinstance(c, Image.Image | np.ndarray) for c in content):
                return [{"type": "video", "video": list(content)}]
            return [item for c in content for item in self._items(c)]
        raise UnreadableMedia(
            f"{type(content).__name__} is no content: give text, an image, frames, a path, or a chat "
            "content list"
        )

    def _process(self, items: list[dict[str, Any]], fingerprint: str) -> Chunk:
        assert self.format is not None
        images = [load_image(i) for i in items if i["type"] == "image"]
        clips = [_clip(i) for i in items if i["type"] == "video"]
        plain = [
            {"type": "text", "text": i["text"]} if i["type"] == "text" else {"type": i["type"]} for i in items
        ]
        text = self.format.content_text(plain)
        label = "".join(i.get("text", f"<{i['type']}>") for i in items)[:80]
        if not images and not clips:
            ids = self.tokenize(text)
            if ids.shape[0] == 0:
                raise EmptyChunk(f"content {text!r} has no tokens: give at least one")
            return self.from_tensors(ids, {}, fingerprint, label)
        given: dict[str, Any] = {
            "text": [text],
            "return_tensors": "pt",
            "add_special_tokens": False,
        }
        if images:
            given["images"] = images
        if clips:
            given["videos"] = [np.stack([np.asarray(f) for f in c.frames]) for c in clips]
            given["do_sample_frames"] = False
            given["video_metadata"] = [
                {
                    "fps": c.fps,
                    "total_num_frames": c.total_frames,
                    "duration": c.duration,
                    "frames_indices": list(c.indices),
                }
                for c in clips
            ]
        try:
            made = self.format.processor(**given)
        except ImportError as error:
            raise ModalityNotSupported(
                f"the processor needs a package for {sorted({i['type'] for i in items})}: {error}"
            ) from None
        inputs = {k: v for k, v in made.items() if k in self.accepted and k != "input_ids"}
        return self.from_tensors(made["input_ids"], inputs, fingerprint, label)


def _as_images(item: dict[str, Any]) -> list[dict[str, Any]]:
    """A clip's frames as pictures, for processors without a video processor."""
    if item["type"] != "video":
        return [item]
    return [{"type": "image", "image": frame} for frame in _clip(item).frames]


def _clip(item: dict[str, Any]) -> Clip:
    video = item.get("video")
    return video if isinstance(video, Clip) else load_clip(item)


def _checked(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type")
    if kind is None:
        kind = next((k for k in ("text", "image", "video") if k in item), None)
    if kind == "text" and isinstance(item.get("text"), str):
        return {"type": "text", "text": item["text"]}
    if kind in ("image", "video"):
        return {**item, "type": kind}
    raise UnreadableMedia(
        f"content item {dict(item)!r} is none of text, image, video: give "
        '{"type": "text", "text": …}, {"type": "image", "image": …} or {"type": "video", "video": …}'
    )


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
