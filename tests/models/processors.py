"""A real tokenizer and a real picture processor, built offline: Pillow only, no torchvision."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from tests.models import tiny

SPECIAL = (
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's."""


class PictureProcessor(Qwen2_5_VLProcessor):
    """`Qwen2_5_VLProcessor` for text and pictures."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes and the special tokens of Qwen2.5-VL: 263 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=[s for s in SPECIAL[1:] if s != "<|im_end|>"],
    )
    made.chat_template = chat_template
    return made


def picture_processor(chat_template: str | None = CHATML, **size: int) -> PictureProcessor:
    """Patches of 4 pixels, merged 2 x 2: a token is 8 x 8 pixels."""
    pictures = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 64 * 64, **size},
    )
    return PictureProcessor(pictures, tokenizer(), chat_template=chat_template)


def matching_model(seed: int = 0) -> nn.Module:
    """A tiny Qwen2.5-VL over this tokenizer's vocabulary."""
    base: Any = tiny.build("qwen2_5_vl").config.to_dict()
    ids = {name: SPECIAL.index(token) for name, token in _CONFIG_TOKENS.items()}
    config = Qwen2_5_VLForConditionalGeneration.config_class(**{**base, **ids})
    config.text_config.vocab_size = 272
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    tiny.randomise(model, seed)
    return model


_CONFIG_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
