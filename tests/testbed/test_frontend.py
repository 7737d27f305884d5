"""Tokenizer and processor: real classes, no torchvision, videos refused."""

import numpy as np
import pytest

from kamera import Backbone
from kamera.backbones.load import load_processor
from kamera.testbed import COLOURS, GLYPHS, SYSTEM, World, load, weights_dir
from kamera.testbed.frontend import build_processor, build_tokenizer


@pytest.fixture(scope="module")
def processor():
    return load_processor(weights_dir())


def chat(frames, text):
    content = [part for frame in frames for part in frame.content]
    content.append({"type": "text", "text": text})
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


@pytest.mark.parametrize("text", ["value of tag 17?", "héllo, wörld 漢字 🙂\n\t  x", "<|im_end|>", ""])
def test_any_text_survives_the_tokenizer(processor, text):
    assert processor.tokenizer.decode(processor.tokenizer(text).input_ids) == text


def test_every_answer_is_one_token(processor):
    assert {len(processor.tokenizer(word).input_ids) for word in (*COLOURS, *GLYPHS)} == {1}


def test_questions_about_everything_have_one_length(processor):
    questions = World(0).episode(0).questions
    assert {len(processor.tokenizer(question.text).input_ids) for question in questions} == {5}


def test_the_packaged_tokenizer_is_the_one_the_code_builds(processor):
    assert build_tokenizer().get_vocab() == processor.tokenizer.get_vocab()


def test_a_chunk_of_text_has_the_same_tokens_alone_and_in_the_window(processor):
    frames = World(0).episode(0).frames
    question = "value of tag 17?"
    template = processor.apply_chat_template
    whole = template(chat(frames, question), add_generation_prompt=True, tokenize=True)[0]
    tokenizer = processor.tokenizer
    parts = list(tokenizer(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n").input_ids)
    for frame in frames:
        cells = len(frame.glyphs) * len(frame.glyphs[0])
        wrapped = f"<|vision_start|>{'<|image_pad|>' * cells}<|vision_end|>{frame.caption}"
        parts += tokenizer(wrapped).input_ids
    parts += tokenizer(f"{question}<|im_end|>\n<|im_start|>assistant\n").input_ids
    assert list(whole) == parts


def test_chunks_of_items_are_as_long_as_promised(processor):
    for frame, low, high in zip(World(0).episode(0).frames, [36] * 3 + [128], [100] * 3 + [256], strict=True):
        inputs = processor(images=[frame.image], text="<|vision_start|><|image_pad|><|vision_end|>")
        assert low <= len(inputs["input_ids"][0]) <= high


def test_a_video_is_refused_by_name(processor):
    messages = [{"role": "user", "content": [{"type": "video", "video": "clip.mp4"}]}]
    with pytest.raises(ValueError, match="not videos"):
        processor.apply_chat_template(messages, tokenize=True)
    with pytest.raises(ValueError, match="not videos"):
        processor(text="<|vision_start|><|video_pad|><|vision_end|>")


def test_the_packaged_processor_is_the_one_the_code_builds(processor):
    built = build_processor()
    assert type(processor) is type(built)
    assert processor.chat_template == built.chat_template
    picture = World(0).episode(0).frames[0].image
    shown = [
        p(images=[picture], text="<|vision_start|><|image_pad|><|vision_end|>") for p in (processor, built)
    ]
    assert np.array_equal(shown[0]["pixel_values"], shown[1]["pixel_values"])


def test_a_backbone_by_load_and_one_by_directory_share_their_archive():
    by_load = Backbone(*load())
    assert Backbone.from_pretrained(weights_dir(), dtype="float32").fingerprint == by_load.fingerprint
