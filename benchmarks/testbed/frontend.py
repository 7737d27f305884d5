"""Tokenizer and chat templates: the world's English as tokens, the shipped backbone's."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.testbed import backbone
from kamera.testbed import SYSTEM
from kamera.testbed.frames import COLOURS, GLYPHS, KINDS, TAGS, Fact, sentence
from kamera.testbed.world import question_text

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
    "<image>",
)
SYSTEM_PROMPTS = (
    SYSTEM,
    "You are a helpful assistant.",
    "Answer the question about the frames.",
    "You are a robot with a camera. Answer in one word.",
    "",
)
"""The system prompts of the training windows; the first one is the testbed's default."""

_TEMPLATE = (
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
    glyphs, everything = range(len(GLYPHS)), []
    for kind, count in (("value", len(TAGS)), ("glyph", len(TAGS)), ("colour", len(GLYPHS))):
        everything += [question_text(kind, subject) for subject in range(count)]
    for colour in range(len(COLOURS)):
        everything.append(sentence("legend", Fact(colour, colour=colour)))
    for glyph in glyphs:
        everything.append(sentence("rename", Fact(glyph, target=glyph)))
    for tag in range(len(TAGS)):
        everything.append(sentence("items", Fact(tag % len(GLYPHS), tag=tag)))
    words = [*GLYPHS, *COLOURS, *TAGS, "image"]
    roles = ["system\n", "user\n", "assistant\n"]
    captions = [f"{kind}\n" for kind in KINDS.values()]
    everything += [*words, *(f" {word}" for word in words), *roles, *captions]
    return 20 * everything + 20 * list(SYSTEM_PROMPTS)


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
    """The backbone's processor: its vision token is one cell of a frame."""
    return backbone.processor(build_tokenizer(), _TEMPLATE)
