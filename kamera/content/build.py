"""Chunk building: user content in any form, to token ids and model inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn

from kamera.content.chunk import POSITION_INPUTS, TOKEN_TYPES, Chunk
from kamera.content.items import Turn, as_messages, as_turns, items_of, make_turns, own_entries, text_turns
from kamera.content.limits import DEFAULT_LIMITS, MediaLimits
from kamera.content.media_tokens import MediaTokens
from kamera.content.plain import hold_tokenizer
from kamera.content.prompt import PromptFormat, PromptText
from kamera.content.sizing import SIZES, check_sizes
from kamera.content.template import Seams
from kamera.content.video import Clip, load_media
from kamera.errors import (
    EmptyChunk,
    IncompatibleChunk,
    ModalityNotSupported,
    ProcessorRequired,
    quote,
)

Content = Any
"""A string, a picture, a path, frames, one chat content item, a list of items, or chat messages.

A string that names a picture or a video (its path, a data url) is that; any other is text.
"""

Spoken = str | torch.Tensor | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, token ids ``[tokens]``, or chat messages."""

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


_NO_CONTENT = {
    "inputs_embeds": "its embeddings are those of its token ids",
    "labels": "nothing is trained",
    "logits_to_keep": "a question asks for logits",
    "mm_encoder_outputs": "its pictures are encoded once, and kept",
    "past_key_values": "a window has the KV in front of it",
    "position_ids": "a window gives it positions, which are the model's own",
    "use_audio_in_video": "it has no sound",
    "use_cache": "its KV is always kept",
}
"""Arguments of a model's forward that are no content, and why."""


class ChunkBuilder:
    """Turns content into chunks for one model and processor.

    ``sees`` is True if the model has a vision tower, ``limits`` bound its media.
    """

    def __init__(
        self, model: nn.Module, processor: Any | None, *, sees: bool, limits: MediaLimits = DEFAULT_LIMITS
    ) -> None:
        self.model, self.limits = model, limits
        forward: Any = model.forward
        self.accepted = [
            n
            for n, p in inspect.signature(forward).parameters.items()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        self.takes_pixels = sees and "pixel_values" in self.accepted
        config: Any = model.config
        self.image_token = _first(config, "image_token_id", "image_token_index")
        self.video_token = _first(config, "video_token_id", "video_token_index")
        both = (self.image_token, self.video_token)
        self.vision_tokens = tuple(token for token in both if token is not None)
        """Ids of the tokens that picture and clip features replace."""
        self.format = None if processor is None else PromptFormat(processor, self.vision_tokens)
        self._media = None if self.format is None else MediaTokens(self.format)

    @property
    def generation_config(self) -> Any:
        """The model's own settings of its answers; None for a model without."""
        return getattr(self.model, "generation_config", None)

    @property
    def token_count(self) -> int:
        """Number of token ids of the model: valid ones are below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator, union-attr, arg-type]

    def from_content(self, content: Content, fingerprint: str) -> Chunk:
        """Build a chunk from chat content or messages, an image, frames, a video file or text.

        A single user message gives its content only, because a window is within the user's turn. Messages of
        other roles close that turn, and the chunk opens it again.
        """
        turns = as_turns(content)
        items = [item for turn in turns for item in items_of(turn)]
        if not items and not any(turn.keys() > {"role", "content"} for turn in turns):
            raise EmptyChunk(f"content {quote(content)} is empty: give text, an image or a video")
        if self.format is None:
            raise ProcessorRequired(
                "this backbone has no processor, so content cannot be tokenised: pass one "
                "(Backbone(model, processor)) or use chunk_from_tensors"
            )
        media = [i["type"] for i in items if i["type"] != "text"]
        if media and not (self.takes_pixels and "image" in self.format.kinds):
            raise ModalityNotSupported(
                f"{type(self.model).__name__} with {type(self.format.processor).__name__} takes text "
                f"only, the content holds {sorted(set(media))}: "
                + (self.format.lacks(media) or "use a vision-language backbone")
            )
        if any(map(own_entries, items)) and self.format.has_template:
            self.format.read_entries(turns)
        turns = [
            turn if isinstance(turn["content"], str) else {**turn, "content": self._load(turn["content"])}
            for turn in turns
        ]
        return self._process(turns, fingerprint)

    def question_ids(self, question: Spoken, tail: str) -> torch.Tensor:
        """Token ids of a question, int64 ``[tokens]``; ``tail`` follows text, the template ends messages.

        Special tokens spelt in text are text (`PlainText`); ids are checked against the vocabulary.
        """
        messages = as_messages(question)
        if messages is None and not isinstance(question, str):
            return self.check_ids(question)
        template = self._template_for(str(question))
        turns = make_turns("user", str(question)) if messages is None else text_turns(messages, "question")
        return template.token_ids(template.question(turns, tail))

    def anchor_ids(self, system: Spoken | None) -> torch.Tensor:
        """Token ids of the anchor for this system prompt, int64 ``[tokens]``.

        Without a processor, None gives no tokens and text raises ProcessorRequired.
        """
        messages = None if system is None else as_messages(system)
        if system is not None and not isinstance(system, str) and messages is None:
            return self.check_ids(system)
        if self.format is None and not system:
            return torch.empty(0, dtype=torch.int64)
        template = self._template_for(str(system))
        turns = text_turns(messages, "system prompt") if messages else []
        turns = make_turns("system", system) if isinstance(system, str) else turns
        # without a template the tokenizer's own BOS opens the sequence
        return template.token_ids(template.opening(turns), special=not template.has_template)

    def seams(self, system: str | None) -> Seams:
        """The chat template's text before the first chunk, after a question, and after an answer."""
        return Seams(system or "", "", "") if self.format is None else self.format.seams(system)

    def check_ids(self, given: Any) -> torch.Tensor:
        """Token ids ``[tokens]`` as int64 on the CPU. Raises ValueError unless they are ids of this model."""
        try:
            ids = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{quote(given)} of {type(given).__name__}: give integer ids [tokens]") from None
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.numel() == 0:
            return torch.empty(0, dtype=torch.int64)  # of any dtype: torch makes an empty list floats
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"input_ids of shape {tuple(ids.shape)}, {ids.dtype}: give integer ids [tokens]")
        size = self.token_count
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"token id {int(ids.min()) if int(ids.min()) < 0 else int(ids.max())} is outside the "
                f"vocabulary of {size}: tokenise with this backbone's tokenizer"
            )
        return ids.to(device="cpu", dtype=torch.int64, copy=True)

    def from_tensors(
        self,
        input_ids: Any,
        inputs: Mapping[str, Any],
        fingerprint: str,
        label: str = "",
        picture: Image.Image | None = None,
    ) -> Chunk:
        """Build a chunk from token ids ``[tokens]`` (or ``[1, tokens]``) and the model's own inputs.

        Tokens that an ``attention_mask`` hides at either end are pads, and dropped. Token types are those
        given, else the processor's; without either they are read off the ids. Raises IncompatibleChunk for
        what is no content or does not belong together, ModalityNotSupported for an input of other models.
        """
        ids = self.check_ids(input_ids)
        given = {name: value for name, value in inputs.items() if value is not None}
        shown = _shown_tokens(given.pop("attention_mask", None), ids)
        length, ids = ids.shape[0], ids[shown]
        if ids.numel() == 0:
            raise EmptyChunk("a chunk of no tokens: give at least one token id")
        tensors: dict[str, torch.Tensor] = {}
        for name, value in given.items():
            if name not in self.accepted:
                raise ModalityNotSupported(
                    f"{type(self.model).__name__} takes no {quote(name)}; it takes "
                    f"{[n for n in self.accepted if 'pixel' in n or 'grid' in n] or 'text only'}"
                )
            if not _is_content(name):
                why = _NO_CONTENT.get(name, "a chunk is token ids, pictures and clips")
                raise IncompatibleChunk(f"{name} is no content of a chunk: {why}; leave it out")
            tensors[name] = _tensor(name, value)
            if name in TOKEN_TYPES:
                kinds = tensors[name].reshape(-1).to(torch.int64)
                if kinds.shape[0] != length:
                    raise ValueError(f"{name} has {kinds.shape[0]} entries for {length} tokens")
                tensors[name] = kinds[shown]
        self._check_grids(tensors)
        if any(name.startswith("pixel_values") for name in tensors):
            tensors |= self._token_types(ids, tensors)
        elif marked := [name for name in TOKEN_TYPES if name in tensors and bool(tensors[name].any())]:
            raise IncompatibleChunk(f"{marked[0]} says that tokens are pictures, and no pixels are given")
        return Chunk(ids, tensors, fingerprint, label, picture)

    def tokenize(self, text: str, *, special: bool = False) -> torch.Tensor:
        """Token ids of trusted ``text``, int64 ``[tokens]``: special tokens in it count.

        ``special`` lets the tokenizer add its BOS.
        """
        return self._template_for(text).token_ids(PromptText(text), special=special)

    def detokenize(self, ids: torch.Tensor) -> str | None:
        """Text of token ids, without special tokens; None without a tokenizer."""
        if self.format is None:
            return None
        with hold_tokenizer(self.format.tokenizer):
            return str(self.format.tokenizer.decode(ids, skip_special_tokens=True))

    def _template_for(self, text: str) -> PromptFormat:
        """What writes ``text``. Raises ProcessorRequired, naming it."""
        if self.format is None:
            raise ProcessorRequired(
                f"this backbone has no processor to tokenise {quote(text)}: pass token ids, or "
                "Backbone(model, processor)"
            )
        return self.format

    def _check_grids(self, inputs: Mapping[str, torch.Tensor]) -> None:
        for pixels, grid in _GRIDS.items():
            if pixels not in self.accepted or grid not in self.accepted:
                continue
            for name, partner in ((pixels, grid), (grid, pixels)):
                if name in inputs and partner not in inputs:
                    raise IncompatibleChunk(
                        f"{name} without {partner}: {type(self.model).__name__} needs both, as its "
                        "processor gives them"
                    )
            if grid in inputs:
                sizes, rows = inputs[grid], inputs[pixels].shape[:1].numel()
                if sizes.dim() != 2 or sizes.shape[1] != 3 or int(sizes.prod(1).sum()) != rows:
                    raise IncompatibleChunk(
                        f"{grid}={sizes.tolist()} for {rows} rows of {pixels}: give both as the processor "
                        "made them, a row of three numbers for each picture or clip"
                    )

    def _token_types(self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Types of tokens that ``inputs`` lack. Raises IncompatibleChunk for some that are not the ids'."""
        places = torch.isin(ids, torch.tensor(self.vision_tokens, dtype=ids.dtype))
        own: dict[str, torch.Tensor] = {}
        for name in [n for n in TOKEN_TYPES if n in self.accepted]:
            kinds = inputs.get(name)
            if kinds is None:
                kinds = own[name] = self._read_types(name, ids)
            if not bool(kinds[places].all()):
                raise IncompatibleChunk(
                    f"{name} says that {int((kinds[places] == 0).sum())} tokens of pictures are text: give "
                    "what the processor made of these ids, or leave it out"
                )
        return own

    def _read_types(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Types of tokens as the processor makes them of ids, else of the tokens that the config names."""
        processor = None if self.format is None else self.format.processor
        make = getattr(processor, f"create_{name}", None)
        if make is not None and len(inspect.signature(make).parameters) == 1:
            return torch.as_tensor(make([ids.tolist()]))[0].to(torch.int64)
        if name == "moe_mm_token_type_ids":
            raise IncompatibleChunk(
                f"no {name}: {type(self.model).__name__} sends tokens around a picture to its vision "
                "experts, too, and the ids do not say which; give those that the processor made"
            )
        kinds = torch.zeros_like(ids)
        if self.image_token is not None:
            kinds[ids == self.image_token] = 1
        if self.video_token is not None:
            kinds[ids == self.video_token] = 2
        return kinds

    def _load(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Items with their pictures and clips in memory, in their requested sizes.

        For processors without a video part a clip becomes its frames, one picture each.
        """
        assert self.format is not None
        out, processor = list[dict[str, Any]](), self.format.processor
        for item in items:
            kind = item["type"]
            if kind == "text":
                out.append(item)
                continue
            rest = {name: item[name] for name in item if name in self.format.entries}
            media = load_media({n: item[n] for n in item if n not in rest}, processor, self.limits)
            rest["sized"] = any(item.get(name) is not None for name in SIZES)
            if kind == "image" or "video" in self.format.kinds:
                out.append({**rest, "type": kind, kind: media})
            else:
                assert isinstance(media, Clip)
                out += [{**rest, "type": "image", "image": frame} for frame in media.frames]
        return out

    def _process(self, turns: list[Turn], fingerprint: str) -> Chunk:
        assert self.format is not None and self._media is not None
        items = [item for turn in turns for item in items_of(turn)]
        prompt = self.format.chunk(turns)
        label = "".join(i.get("text", f"<{i['type']}>") for i in items)[:80]
        images = [i["image"] for i in items if i["type"] == "image"]
        clips: list[Clip] = [i["video"] for i in items if i["type"] == "video"]
        if (images or clips) and not self._media.stands_beside([*images, *clips]):
            raise ModalityNotSupported(
                f"{type(self.format.processor).__name__} writes a picture in other tokens beside others than "
                "alone, and a chunk of a window stands beside others: use ChatSession, or build the chunk "
                "with chunk_from_tensors"
            )
        if not images and not clips:
            ids = self.format.token_ids(prompt)
            if ids.shape[0] == 0:
                raise EmptyChunk(f"content {quote(label)} has no tokens: give at least one")
            return self.from_tensors(ids, {}, fingerprint, label)
        inputs: dict[str, Any] = self.format.process(prompt.text, images, clips)
        check_sizes(self.format.processor, items, inputs)
        ids = torch.as_tensor(inputs.pop("input_ids"))[0]
        inputs.pop("attention_mask", None)  # of one prompt: no pads
        if prompt.hidden:
            ids, inputs = self.format.plain.splice(ids, prompt.word, prompt.hidden, inputs)
        inputs = {name: value for name, value in inputs.items() if name in self.accepted}
        first = next(i for i in items if i["type"] != "text")
        picture = first["image"] if first["type"] == "image" else first["video"].frames[0].copy()
        return self.from_tensors(ids, inputs, fingerprint, label, picture)


def _is_content(name: str) -> bool:
    """True for an input that a processor makes of pictures and clips, and for types of tokens."""
    parts = "pixel", "image", "video", "frame"
    return name in POSITION_INPUTS or (name not in _NO_CONTENT and any(part in name for part in parts))


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise IncompatibleChunk(f"{name}={quote(value)} is no tensor: give what the processor made") from None


def _shown_tokens(mask: Any, ids: torch.Tensor) -> slice:
    """The tokens that a mask ``[tokens]`` or ``[1, tokens]`` shows, which follow each other."""
    if mask is None:
        return slice(None)
    shown = _tensor("attention_mask", mask)
    shown = shown[0] if shown.dim() == 2 and shown.shape[0] == 1 else shown
    if shown.shape != ids.shape or not bool(torch.isin(shown, torch.tensor([0, 1], dtype=shown.dtype)).all()):
        raise IncompatibleChunk(
            f"attention_mask of shape {tuple(shown.shape)} for {ids.shape[0]} tokens: give a 1 or 0 for each"
        )
    places = shown.nonzero().flatten().tolist()
    start, stop = (places[0], places[-1] + 1) if places else (0, 0)
    if len(places) != stop - start:
        raise IncompatibleChunk(
            f"attention_mask hides {stop - start - len(places)} tokens between others: a chunk is read "
            "whole; take them out of input_ids"
        )
    return slice(start, stop)


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
