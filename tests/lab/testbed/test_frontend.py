"""Tokenizer and processors: real classes, no torchvision, videos refused."""

import numpy as np
import pytest
import torch

from kamera import Backbone
from kamera.engines.hf import HfEngine
from kamera.engines.hf.load import load_processor
from kamera.testbed import COLOURS, GLYPHS, SYSTEM, World
from lab.testbed import FAMILIES, load, weights_dir
from lab.testbed.batches import chunk_ids, pack, vision_inputs
from lab.testbed.frontend import build_processor, build_tokenizer

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("text", ["value of tag 17?", "héllo, wörld 漢字 🙂\n\t  x", "<|im_end|>", ""])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_answer_is_one_token(tokenizer):
    assert {len(tokenizer(word).input_ids) for word in (*COLOURS, *GLYPHS)} == {1}


def test_questions_about_everything_have_one_length(tokenizer):
    questions = World(0).episode(0).questions
    assert {len(tokenizer(question.text).input_ids) for question in questions} == {5}


@every_family
def test_the_packaged_processor_is_the_one_the_code_builds(family):
    packaged, built = load_processor(weights_dir(family.name)), build_processor(family.name)
    assert packaged.tokenizer.get_vocab() == built.tokenizer.get_vocab()
    assert type(packaged) is type(built)
    assert packaged.chat_template == built.chat_template
    picture = World(0).episode(0).frames[0].image
    text = f"{family.before}{family.placeholder}{family.after}"
    shown = [p(images=[picture], text=text) for p in (packaged, built)]
    assert np.array_equal(np.array(shown[0]["pixel_values"]), np.array(shown[1]["pixel_values"]))


@every_family
def test_training_sees_what_the_processor_gives(family):
    """Token ids and pixels of a packed window are those of the window's chunks."""
    model, processor = load(family.name)
    backbone = HfEngine(model, processor)
    episode = World(0).episode(0, layout="LRiPI")
    chunks = [backbone.chunk(frame.content) for frame in episode.frames]
    for chunk, frame in zip(chunks, episode.frames, strict=True):
        assert chunk.input_ids.tolist() == chunk_ids(family, processor.tokenizer, frame)
    batch = pack(family, model, processor.tokenizer, [episode], [episode.questions[:1]], SYSTEM)
    drawn = vision_inputs(family, batch)["pixel_values"]
    shown = [chunk.inputs["pixel_values"] for chunk in chunks if "pixel_values" in chunk.inputs]
    if family.name == "mha":  # pictures of one window are padded to the largest
        drawn = [one[:, : s.shape[-2], : s.shape[-1]] for one, s in zip(drawn, shown, strict=True)]
        drawn, shown = torch.cat([d.flatten() for d in drawn]), [s.flatten() for s in shown]
    assert (torch.cat(shown) - drawn).abs().max() < 1e-5


def test_small_frames_have_64_tokens_and_items_144_or_256(tokenizer):
    lengths = {}
    for letter in "LRPIB":
        frame = World(0).episode(0, layout=letter).frames[0]
        ids = chunk_ids(FAMILIES["gqa"], tokenizer, frame)
        lengths[letter] = ids.count(tokenizer.get_vocab()["<|image_pad|>"])
    assert lengths == {"L": 64, "R": 64, "P": 64, "I": 144, "B": 256}


@pytest.mark.parametrize("name", ["gqa", "deepstack", "mla"])
def test_a_video_is_refused_by_name(name):
    processor = load_processor(weights_dir(name))
    with pytest.raises(ValueError, match="not videos"):
        processor(text=f"{processor.video_token}")
    with pytest.raises(ValueError, match="not videos"):
        processor(text="x", videos=[np.zeros((2, 32, 32, 3), dtype=np.uint8)])


@every_family
def test_backbones_by_load_and_by_directory_share_an_archive(family):
    by_load = HfEngine(*load(family.name))
    by_directory = Backbone.from_pretrained(weights_dir(family.name), dtype="float32").engine
    assert by_directory.fingerprint == by_load.fingerprint
