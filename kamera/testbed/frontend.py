"""Tokenizer and processor: the world's English as tokens, frames as patches."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from kamera.backbones.image_only import image_only

from .render import CELL
from .world import COLOURS, GLYPHS, KINDS, TAGS, question_text

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SYSTEM_PROMPTS = (
    "You watch a camera.",
    "You are a helpful assistant.",
    "Answer the question about the frames.",
    "You are a robot with a camera. Answer in one word.",
    "",
)
"""The system prompts of the training windows; the first one is the testbed's default."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def _corpus() -> list[str]:
    lines = [
        question_text(kind, subject)
        for kind in ("value", "glyph", "colour")
        for subject in range(len(GLYPHS if kind == "colour" else TAGS))
    ]
    words = [*GLYPHS, *COLOURS, *TAGS]
    roles = ["system\n", "user\n", "assistant\n"]
    captions = [f"{kind}\n" for kind in KINDS.values()]
    return 20 * [*lines, *words, *(f" {word}" for word in words), *roles, *captions] + 20 * list(
        SYSTEM_PROMPTS
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of the world's sentences; any text tokenizes, byte by byte at worst."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        min_frequency=10,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[token for token in SPECIAL[1:] if token != "<|im_end|>"],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> Any:
    """The processor whose vision token is one cell of a frame: patches of 8 pixels, merged 2 x 2."""
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=CELL // 2,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": CELL * CELL, "longest_edge": (64 * CELL) ** 2},
    )
    return image_only(Qwen2_5_VLProcessor)(image_processor, build_tokenizer(), chat_template=CHAT_TEMPLATE)
