"""The tiny models with a chat template: a tokenizer over `tiny`'s own ids, and pictures for those that see.

A picture's pixels seed the family's `samples.sample`, in another size if it is wider than high.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from kamera.content.chunk import TOKEN_TYPES
from kamera.engines.hf import HfEngine
from tests.models import processors, samples, tiny

_SPELT = {
    0: "<pad>",
    1: "<bos>",
    2: "<|im_end|>",
    100: "<|im_start|>",
    tiny.IMAGE: "<|image_pad|>",
    tiny.VIDEO: "<|video_pad|>",
    tiny.VISION_START: "<|vision_start|>",
    tiny.VISION_END: "<|vision_end|>",
}
UNSPOKEN = [*_SPELT, *range(101, tiny.VOCABULARY)]
"""Ids that an answer in plain text does not hold."""


def talking(model: nn.Module, name: str) -> HfEngine:
    """``model``, which is of the family ``name``, with a chat template."""
    if name in samples.PICTURED:
        return HfEngine(model, PictureTalker(name, tuple(inspect.signature(model.forward).parameters)))
    return HfEngine(model, tokenizer())


def tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII and line ends from id 3 on, special tokens where `tiny` has them."""
    letters = ["Ċ", "Ġ", *(chr(i) for i in range(0x21, 0x7F))]
    spelt = {i: token for i, token in enumerate(letters, start=3)} | _SPELT
    vocabulary = {spelt.get(i, f"<{i}>"): i for i in range(tiny.VOCABULARY)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=[token for i, token in _SPELT.items() if i > 2],
    )
    made.chat_template = processors.CHATML
    return made


class PictureTalker:
    """A processor for text and pictures of the family ``name``; ``accepted`` are its model's arguments."""

    image_token = "<|image_pad|>"

    def __init__(self, name: str, accepted: Sequence[str]) -> None:
        self.tokenizer = tokenizer()
        self.chat_template = self.tokenizer.chat_template
        self.image_processor = _Pictures(name)
        self._types = [n for n in TOKEN_TYPES if n in accepted]

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        """The rendered text."""
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(
        self, *, text: Sequence[str], images: Sequence[Sequence[Image.Image]] = (), **_: Any
    ) -> Mapping[str, torch.Tensor]:
        """Token ids ``[1, tokens]`` with every placeholder expanded, and the model's inputs.

        ``images`` are those of each text, as a real processor's template method hands them.
        """
        given = [self.image_processor.sample(image) for of_text in images for image in of_text]
        pieces = text[0].split(self.image_token)
        counts = [int((one.input_ids == tiny.IMAGE).sum()) for one in given]
        ids = self.tokenizer(pieces[0], add_special_tokens=False)["input_ids"]
        for count, piece in zip(counts, pieces[1:], strict=True):
            ids += [tiny.IMAGE] * count + self.tokenizer(piece, add_special_tokens=False)["input_ids"]
        made = {"input_ids": torch.tensor([ids])}
        if given:
            made |= {name: (made["input_ids"] == tiny.IMAGE).long() for name in self._types}
        return made | samples.joined_media([one.vision_inputs for one in given])


class _Pictures:
    """The picture part of a processor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def sample(self, image: Image.Image) -> samples.Sample:
        seed = zlib.crc32(image.tobytes()) % 10_000
        return samples.sample(self._name, seed, wide=image.width > image.height)

    def to_dict(self) -> dict[str, Any]:
        return {"family": self._name}
