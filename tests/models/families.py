"""Real processors of the families over tiny models with vocabularies to match, built offline.

Each has a byte-level tokenizer with its family's special tokens, a chat template in its family's manner, and
the stock classes of transformers. `build` makes one anew, `engine` shares one. Video processors need
torchvision: without it a processor takes pictures alone, as Kamera's own loader builds it. `whole_prompt` and
`plain_logits` are the reference: transformers over the whole history, nothing of Kamera in it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from kamera.content.without_video import image_only
from kamera.engines.hf import HfEngine
from tests.models import tiny

TORCHVISION = importlib.util.find_spec("torchvision") is not None
_CHAT = ("<pad>", "<bos>", "<|im_end|>", "<|im_start|>")
_VOCABULARY = 320
_SIZE = {"shortest_edge": 64, "longest_edge": 64 * 64}
_FRAMES = {"shortest_edge": 64, "longest_edge": 64 * 64 * 8}
_PATCHES: dict[str, Any] = {"patch_size": 4, "merge_size": 2}
_SQUARE = {"height": 16, "width": 16}

Tokens = dict[str, str]


def build(family: str) -> tuple[nn.Module, Any]:
    """A tiny model and its processor, both new."""
    return _FAMILIES[family][0]()


@functools.cache
def engine(family: str) -> HfEngine:
    """The shared engine of a family: never write into its model or processor."""
    return HfEngine(*build(family))


def sees_clips(family: str) -> bool:
    """True if the processor that `build` makes here takes clips."""
    return TORCHVISION and _FAMILIES[family][1] == "clips"


def present() -> list[str]:
    """The families that can be built here."""
    return [name for name in _FAMILIES if not _missing(name)]


def _missing(family: str) -> list[str]:
    return [package for package in _FAMILIES[family][2] if importlib.util.find_spec(package) is None]


def families(names: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test: the families (those of ``names``), skipped where this environment has not what
    their processors need."""
    out = list[Any]()
    for name in names or _FAMILIES:
        needs = _missing(name)
        reason = f"{name}'s processor needs {', '.join(needs)}"
        marks = [pytest.mark.video] if _FAMILIES[name][2] or _FAMILIES[name][1] == "clips" else []
        out.append(pytest.param(name, marks=[*marks, pytest.mark.skipif(bool(needs), reason=reason)]))
    return out


# -- the reference ---------------------------------------------------------------------------------

RATE = 2.0
"""Frames per second of the clips that `clip` makes."""

Messages = list[dict[str, Any]]


def picture(width: int = 32, height: int = 32, seed: int = 0) -> Image.Image:
    """Noise, another for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def clip(frames: int = 4, seed: int = 0) -> dict[str, Any]:
    """The item of a clip of noise."""
    pictures = [picture(seed=1000 + 100 * seed + i) for i in range(frames)]
    return {"type": "video", "video": pictures, "fps": RATE}


def said(role: str, *parts: Any) -> dict[str, Any]:
    """A message of texts, pictures and other items, as a list of parts."""
    items = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "role": role,
        "content": [{"type": "image", "image": i} if isinstance(i, Image.Image) else i for i in items],
    }


def whole_prompt(processor: Any, messages: Messages, tools: Any = None) -> dict[str, torch.Tensor]:
    """Model inputs of the whole history, from the processor's own template method."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    clips = [len(i["video"]) for content in contents for i in content if i["type"] == "video"]
    times: dict[str, Any] = {}
    if clips:
        shown = [
            {"fps": RATE, "total_num_frames": n, "duration": n / RATE, "frames_indices": [*range(n)]}
            for n in clips
        ]
        times = {"processor_kwargs": {"do_sample_frames": False, "video_metadata": shown}}
    asked: dict[str, Any] = {"tools": tools} if tools else {}
    made = processor.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **asked,
        **times,
    )
    return dict(made)


def plain_logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits ``[vocabulary]`` of the first token of an answer, from one forward without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0, -1]
    return logits


Builder = Callable[[], tuple[nn.Module, Any]]
_FAMILIES: dict[str, tuple[Builder, str, tuple[str, ...]]] = {}


def _family(media: str, *needs: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        _FAMILIES[builder.__name__] = builder, media, needs
        return builder

    return add


# -- parts -----------------------------------------------------------------------------------------


def tokenizer(
    special: Sequence[str],
    template: str,
    *,
    eos: str = "<|im_end|>",
    bos: str = "<bos>",
    begins: bool = False,
    merges: Sequence[tuple[str, str]] = (),
    **named: str,
) -> PreTrainedTokenizerFast:
    """Bytes behind the ``special`` tokens, which have the ids from 0 on; ``begins`` lets it add its BOS."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    if begins:
        beginning = [(bos, vocabulary[bos])]
        bpe.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=beginning)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token=bos, eos_token=eos, extra_special_tokens=named
    )
    rest = [token for token in special if token not in ("<pad>", bos, eos, *named.values())]
    made.add_tokens([AddedToken(token, special=True) for token in rest], special_tokens=True)
    made.chat_template = template
    return made


def chatml(image: str, video: str = "") -> str:
    """ChatML with these placeholders; text as it is, a string or parts."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        f"{{% if c.type == 'image' %}}{image}{{% elif c.type == 'video' %}}{video}"
        "{% else %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _pictures(kind: str, name: str, **options: Any) -> Any:
    """The picture processor that needs Pillow alone."""
    return _class(f"{kind}.image_processing_pil_{kind}", f"{name}ImageProcessorPil")(**options)


def _processor(stock: str, clips: tuple[str, dict[str, Any]], pictures: Any, words: Any, **more: Any) -> Any:
    """A stock processor, with a part for ``clips`` of this class and options where torchvision is."""
    kind, (video, options) = getattr(transformers, stock), clips
    parts = {"image_processor": pictures, "tokenizer": words, "chat_template": words.chat_template, **more}
    if not TORCHVISION:
        return image_only(kind)(**parts)
    return kind(video_processor=getattr(transformers, video)(**options), **parts)


def _model(name: str, words: PreTrainedTokenizerFast, tokens: Tokens, **more: Any) -> nn.Module:
    """The tiny model of a family, with the ids of a tokenizer; ``tokens`` by their names in the config."""
    model = tiny.build(name)
    ids = {entry: words.convert_tokens_to_ids(token) for entry, token in tokens.items()}
    config: Any = type(model.config)(**{**model.config.to_dict(), **ids, **more})
    text = config.get_text_config()
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = _VOCABULARY
    text.vocab_size = _VOCABULARY
    text.pad_token_id, text.bos_token_id, text.eos_token_id = 0, 1, 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: nn.Module = type(model)(config).eval()
    tiny.randomise(made, 1)
    return made


# -- families --------------------------------------------------------------------------------------

_QWEN: Tokens = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}


def _qwen(name: str, stock: str, clips: str) -> tuple[nn.Module, Any]:
    template = chatml(*[f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")])
    words = tokenizer([*_CHAT, *_QWEN.values()], template, **_QWEN)
    pictures = _pictures("qwen2_vl", "Qwen2VL", **_PATCHES, temporal_patch_size=2, size=_SIZE)
    processor = _processor(
        stock, (clips, {**_PATCHES, "temporal_patch_size": 2, "size": _FRAMES}), pictures, words
    )
    return _model(name, words, {f"{entry}_id": token for entry, token in _QWEN.items()}), processor


@_family("clips")
def qwen2_vl() -> tuple[nn.Module, Any]:
    return _qwen("qwen2_vl", "Qwen2VLProcessor", "Qwen2VLVideoProcessor")


@_family("clips")
def qwen2_5_vl() -> tuple[nn.Module, Any]:
    return _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")


@_family("clips")
def qwen3_vl() -> tuple[nn.Module, Any]:
    return _qwen("qwen3_vl", "Qwen3VLProcessor", "Qwen3VLVideoProcessor")


def _omni(name: str, stock: str) -> tuple[nn.Module, Any]:
    named = {
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    template = chatml(*[f"<|vision_bos|><|{kind}|><|vision_eos|>" for kind in ("IMAGE", "VIDEO")])
    words = tokenizer([*_CHAT, *named.values()], template, **named)
    pictures = _pictures("qwen2_vl", "Qwen2VL", **_PATCHES, temporal_patch_size=2, size=_SIZE)
    clips = "Qwen2VLVideoProcessor", {**_PATCHES, "temporal_patch_size": 2, "size": _FRAMES}
    ears = transformers.WhisperFeatureExtractor(feature_size=8)
    processor = _processor(stock, clips, pictures, words, feature_extractor=ears)
    processor.videos_kwargs = {"size": _FRAMES}  # else its own smallest clip has 3,000 tokens
    kinds = {kind: f"<|{kind.upper()}|>" for kind in ("image", "video", "audio")}
    ids = {f"{kind}_token_{end}": token for kind, token in kinds.items() for end in ("id", "index")}
    ids |= {"vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>"}
    ids |= {"audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"}
    return _model(name, words, ids), processor


@_family("clips")
def qwen2_5_omni() -> tuple[nn.Module, Any]:
    return _omni("qwen2_5_omni", "Qwen2_5OmniProcessor")


@_family("clips")
def qwen3_omni() -> tuple[nn.Module, Any]:
    return _omni("qwen3_omni", "Qwen3OmniMoeProcessor")


def _glm(name: str, stock: str) -> tuple[nn.Module, Any]:
    """Frames of a clip carry the picture's token."""
    special = {f"{kind}_token": f"<|{kind}|>" for kind in ("image", "video")}
    wrappers = {
        f"{kind}_{side}_token": f"<|{word}_of_{kind}|>"
        for kind in ("image", "video")
        for side, word in (("start", "begin"), ("end", "end"))
    }
    wrapped = [f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video")]
    words = tokenizer([*_CHAT, *special.values(), *wrappers.values()], chatml(*wrapped), **special)
    pictures = _pictures(name, stock, **_PATCHES, temporal_patch_size=2, size=_SIZE)
    clips = f"{stock}VideoProcessor", {**_PATCHES, "temporal_patch_size": 2, "size": _FRAMES}
    processor = _processor(f"{stock}Processor", clips, pictures, words)
    return _model(name, words, {f"{entry}_id": t for entry, t in {**special, **wrappers}.items()}), processor


@_family("clips")
def glm4v() -> tuple[nn.Module, Any]:
    return _glm("glm4v", "Glm4v")


@_family("clips")
def glm46v() -> tuple[nn.Module, Any]:
    return _glm("glm46v", "Glm46V")


@_family("clips")
def ernie() -> tuple[nn.Module, Any]:
    """Pictures have numbers; wrappers of pictures are routed to the experts of vision."""
    kinds = {
        f"{kind}_{part}".removesuffix("_") + "_token": f"<|{kind.upper()}_{word}|>"
        for kind in ("image", "video")
        for part, word in (("start", "START"), ("end", "END"), ("", "PLACEHOLDER"))
    }
    template = (
        "{% set n = namespace(pictures=0, clips=0) %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}{% set n.pictures = n.pictures + 1 %}"
        "Picture {{ n.pictures }}:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
        "{% elif c.type == 'video' %}{% set n.clips = n.clips + 1 %}"
        "Video {{ n.clips }}:<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>"
        "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    words = tokenizer([*_CHAT, *kinds.values()], template, **kinds)
    pictures = _pictures("ernie4_5_vl_moe", "Ernie4_5_VLMoe", **_PATCHES, size=_SIZE)
    clips = "Ernie4_5_VLMoeVideoProcessor", {**_PATCHES, "size": _FRAMES, "draw_on_frames": False}
    processor = _processor("Ernie4_5_VLMoeProcessor", clips, pictures, words)
    return _model("ernie", words, {f"{entry}_id": token for entry, token in kinds.items()}), processor


def _gemma(placeholder: str, text: str) -> str:
    return (
        "{{ bos_token }}{% for m in messages %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        f"{{% if m.content is string %}}{{{{ m.content{text} }}}}{{% else %}}{{% for c in m.content %}}"
        f"{placeholder}{{% else %}}{{{{ c.text{text} }}}}{{% endif %}}"
        "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )


@_family("pictures")
def gemma3() -> tuple[nn.Module, Any]:
    """Runs of newlines are one token, as in Gemma's vocabulary: a picture's merge with the text's."""
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    template = _gemma("{% if c.type == 'image' %}<start_of_image>", " | trim")
    special = ["<pad>", "<bos>", "<end_of_turn>", "<start_of_turn>", *named.values()]
    newlines = [("Ċ" * n, "Ċ" * m) for n, m in ((1, 1), (2, 1), (2, 2))]
    words = tokenizer(special, template, eos="<end_of_turn>", begins=True, merges=newlines, **named)
    pictures = _pictures("gemma3", "Gemma3", size=_SQUARE)
    processor = transformers.Gemma3Processor(pictures, words, chat_template=template, image_seq_length=4)
    ids = {f"image_token_{end}": named["image_token"] for end in ("id", "index")}
    ids |= {"boi_token_index": named["boi_token"], "eoi_token_index": named["eoi_token"]}
    return _model("gemma3", words, ids, mm_tokens_per_image=4), processor


@_family("clips")
def gemma4_vl() -> tuple[nn.Module, Any]:
    named = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    }
    template = _gemma("{% if c.type == 'image' %}<|image|>{% elif c.type == 'video' %}<|video|>", "")
    special = ["<pad>", "<bos>", "<end_of_turn>", "<start_of_turn>", *named.values(), "<|video|>"]
    words = tokenizer(special, template, eos="<end_of_turn>", begins=True, **named)
    options: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = _processor(
        "Gemma4Processor",
        ("Gemma4VideoProcessor", options),
        _pictures("gemma4", "Gemma4", **options),
        words,
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_seq_length=16,
    )
    ids = {f"{kind}_token_id": f"<|{kind}|>" for kind in ("image", "audio", "video")}
    ids |= {"boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
    vision = {**tiny.build("gemma4_vl").config.to_dict()["vision_config"], "position_embedding_size": 64}
    return _model("gemma4_vl", words, ids, vision_config=vision), processor


def _smol(name: str) -> tuple[nn.Module, Any]:
    """The template looks at a message's first item; pictures are cut into rows and columns."""
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    named = {
        "end_of_utterance_token": "<end_of_utterance>",
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "video_token": "<video>",
    }
    template = (
        "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
        "{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
        "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% elif c.type == 'image' %}<image>"
        "{% elif c.type == 'video' %}<video>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    words = tokenizer(
        [*_CHAT, *named.values(), *cells],
        template,
        bos="<|im_start|>",
        eos="<end_of_utterance>",
        **named,
    )
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    if name == "smolvlm":
        small = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
        clips, pictures = ("SmolVLMVideoProcessor", small), _pictures(name, "SmolVLM", **sizes)
        processor = _processor("SmolVLMProcessor", clips, pictures, words, image_seq_len=4)
    else:
        pictures = _pictures(name, "Idefics3", **sizes)
        processor = transformers.Idefics3Processor(pictures, words, image_seq_len=4, chat_template=template)
    return _model(name, words, {"image_token_id": "<image>"}), processor


@_family("clips", "num2words")
def smolvlm() -> tuple[nn.Module, Any]:
    return _smol("smolvlm")


@_family("pictures")
def idefics3() -> tuple[nn.Module, Any]:
    return _smol("idefics3")


@_family("clips")
def internvl() -> tuple[nn.Module, Any]:
    """A clip's frames are pictures with words between them."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    template = chatml("<IMG_CONTEXT>\n", "<video>\n")
    words = tokenizer([*_CHAT, *named.values()], template, **named)
    tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 4}
    pictures = _pictures("got_ocr2", "GotOcr2", size=_SQUARE, **tiles)
    clips = "InternVLVideoProcessor", {"size": _SQUARE}
    processor = _processor("InternVLProcessor", clips, pictures, words, image_seq_length=4)
    return _model("internvl", words, {"image_token_id": "<IMG_CONTEXT>"}), processor


@_family("pictures", "torchvision")
def mistral3() -> tuple[nn.Module, Any]:
    """No generation prompt, and no token that opens a turn of the assistant."""
    special = ["<pad>", "<bos>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}[IMG]{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
        "{% if m.role == 'user' %}[/INST]{% else %}</s>{% endif %}{% endfor %}"
    )
    words = tokenizer(special, template, eos="</s>", begins=True, image_token="[IMG]")
    pictures = _pictures(
        "pixtral", "Pixtral", size={"longest_edge": 32}, patch_size={"height": 4, "width": 4}
    )
    options: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "chat_template": template}
    processor = transformers.PixtralProcessor(pictures, words, **options)
    ids = {f"image_token_{end}": "[IMG]" for end in ("id", "index")}
    return _model("mistral3", words, ids, spatial_merge_size=2), processor


@_family("clips")
def video_llama_3() -> tuple[nn.Module, Any]:
    named = {kind: _QWEN[kind] for kind in ("image_token", "video_token")}
    words = tokenizer([*_CHAT, *named.values()], chatml(*named.values()), **named)
    pictures = _pictures("video_llama_3", "VideoLlama3", **_PATCHES, size=_SIZE)
    clips = "VideoLlama3VideoProcessor", {**_PATCHES, "size": _FRAMES}
    processor = _processor("VideoLlama3Processor", clips, pictures, words)
    return _model("video_llama_3", words, {f"{kind}_id": token for kind, token in named.items()}), processor


@_family("pictures")
def paddleocr_vl() -> tuple[nn.Module, Any]:
    ids = {
        "image_token_id": "<|IMAGE_PLACEHOLDER|>",
        "vision_start_token_id": "<|IMAGE_START|>",
        "vision_end_token_id": "<|IMAGE_END|>",
        "video_token_id": "<|video_pad|>",
    }
    template = chatml("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")
    words = tokenizer([*_CHAT, *ids.values()], template, image_token=ids["image_token_id"])
    pictures = _pictures("paddleocr_vl", "PaddleOCRVL", **_PATCHES, size=_SIZE)
    return _model("paddleocr_vl", words, ids), transformers.PaddleOCRVLProcessor(
        pictures, words, chat_template=template
    )


@_family("pictures")
def deepseek_vl() -> tuple[nn.Module, Any]:
    image = "<image_placeholder>"
    words = tokenizer([*_CHAT, image], chatml(image), image_token=image)
    pictures = _pictures("deepseek_vl", "DeepseekVL", size=_SQUARE)
    options: dict[str, Any] = {"chat_template": words.chat_template, "num_image_tokens": 16}
    processor = transformers.DeepseekVLProcessor(pictures, words, **options)
    return _model("deepseek_vl", words, {"image_token_id": image}), processor


@_family("pictures")
def llava() -> tuple[nn.Module, Any]:
    words = tokenizer([*_CHAT, "<image>"], chatml("<image>\n"), image_token="<image>")
    processor = transformers.LlavaProcessor(
        _pictures("clip", "CLIP", size={"shortest_edge": 16}, crop_size=_SQUARE),
        words,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )
    return _model("llava", words, {f"image_token_{end}": "<image>" for end in ("id", "index")}), processor


@_family("clips")
def llava_onevision() -> tuple[nn.Module, Any]:
    """One picture is cut into tiles, several in a prompt are not; the template writes media before text."""
    named = {"image_token": "<image>", "video_token": "<video>"}
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for c in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
        "{% for c in m.content | selectattr('type', 'equalto', 'video') %}<video>{% endfor %}"
        "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ '\n' + c.text }}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    words = tokenizer([*_CHAT, *named.values()], template, **named)
    tiles = [[16, 16], [16, 32], [32, 16], [32, 32]]
    pictures = _pictures("llava_onevision", "LlavaOnevision", size=_SQUARE, image_grid_pinpoints=tiles)
    processor = _processor(
        "LlavaOnevisionProcessor",
        ("LlavaOnevisionVideoProcessor", {"size": _SQUARE}),
        pictures,
        words,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    ids = {f"{kind}_token_index": f"<{kind}>" for kind in ("image", "video")}
    return _model("llava_onevision", words, ids, image_grid_pinpoints=tiles), processor


FAMILIES = tuple(_FAMILIES)
