"""The shipped backbone: it loads, it binds across chunks, and blind reuse loses exactly that."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from kamera import testbed
from kamera.testbed import reuse
from kamera.testbed.batches import additive, embed, hide_from_questions, isolate, pack
from kamera.testbed.evaluate import HELD_OUT, chat_answers
from kamera.testbed.model import encode_images, to_unit
from kamera.testbed.render import pixels
from kamera.testbed.scoring import accuracy, answer_logits, some_questions
from kamera.testbed.world import TRAINING_SEEDS

ITEMS = 3


@pytest.fixture(scope="module")
def backbone():
    return testbed.load()


@pytest.fixture(scope="module")
def batch(backbone):
    model, processor = backbone
    rng = np.random.default_rng(0)
    episodes = [testbed.World(HELD_OUT).episode(500 + i) for i in range(8)]
    kinds = ("value", "glyph", "colour")
    asked = [some_questions(e, 24, rng, kinds, (0.6, 0.2, 0.2)) for e in episodes]
    return pack(model, processor.tokenizer, episodes, asked, testbed.SYSTEM)


@pytest.fixture(scope="module")
def kv(backbone, batch):
    model, _ = backbone
    return (
        reuse.prefill(model, batch, batch.mask),
        reuse.prefill(model, batch, isolate(batch, [ITEMS])),
    )


def hits(logits, batch, wanted):
    right = logits.argmax(-1) == batch.answers
    return right[torch.tensor([[wanted(q) for q in row] for row in batch.questions])]


def test_full_prefill_answers_and_blind_reuse_answers_fluently_and_wrongly(backbone):
    model, processor = backbone
    assert HELD_OUT < TRAINING_SEEDS
    episodes = [testbed.World(HELD_OUT).episode(600 + i) for i in range(12)]
    masks = {"full": lambda b: b.mask, "blind": lambda b: isolate(b, [ITEMS])}
    masks["evicted"] = lambda b: hide_from_questions(b, range(ITEMS))
    scores = accuracy(model, processor.tokenizer, episodes, masks)
    assert scores["full"]["value"] >= 0.95
    assert scores["full"]["glyph"] >= 0.95 and scores["full"]["colour"] >= 0.95
    assert scores["evicted"]["value"] >= 0.95, "the second hop is not in the items frame's KV"
    assert scores["blind"]["bound"] <= 0.2
    assert scores["blind"]["glyph"] >= 0.95


def test_blind_answers_are_the_defaults(backbone, batch, kv):
    model, processor = backbone
    full, blind = kv
    layers, _ = reuse.patched(blind.layers, full.layers, batch.spans[ITEMS], rank=0)
    said = reuse.ask(model, batch, layers, full.embeddings).argmax(-1)
    alone = [
        processor.tokenizer.convert_tokens_to_ids(episode.answer(question, [ITEMS]))
        for episode, row in zip(batch.episodes, batch.questions, strict=True)
        for question in row
        if question.bound
    ]
    bound = torch.tensor([[q.bound for q in row] for row in batch.questions])
    assert (said[bound] == torch.tensor(alone)).float().mean() >= 0.8


def test_a_patch_of_rank_16_is_enough_and_one_of_rank_1_is_not(backbone, batch, kv):
    model, _ = backbone
    full, blind = kv
    scores = {}
    for rank in (1, 16):
        layers, _ = reuse.patched(blind.layers, full.layers, batch.spans[ITEMS], rank)
        logits = reuse.ask(model, batch, layers, full.embeddings)
        scores[rank] = hits(logits, batch, lambda q: q.bound).float().mean().item()
    assert scores[16] >= 0.95
    assert scores[1] <= scores[16] - 0.1


def test_the_deficit_is_zero_in_the_first_layer_and_large_in_the_last(batch, kv):
    full, blind = kv
    first, last = batch.spans[ITEMS]
    share = [
        ((w[1] - b[1])[:, :, first:last].norm() / w[1][:, :, first:last].norm()).item()
        for w, b in zip(full.layers, blind.layers, strict=True)
    ]
    assert share[0] < 1e-5
    assert share[-1] > 0.1


def test_keys_and_values_are_128_wide(kv):
    for keys, values in kv[0].layers:
        assert keys.shape[1] * keys.shape[3] == values.shape[1] * values.shape[3] == 128


def test_the_batched_vision_path_equals_the_real_one(backbone):
    model, processor = backbone
    for layout in ("I", "L", "P"):
        frames = [testbed.World(0).episode(i, layout=layout).frames[0] for i in range(2)]
        inputs = processor.image_processor([f.image for f in frames], return_tensors="pt")
        with torch.no_grad():
            real = model.model.get_image_features(**inputs, return_dict=True).pooler_output
            fast = encode_images(model, to_unit(pixels(frames)))
        for one, other in zip(real, fast, strict=True):
            assert (one - other).norm() / one.norm() < 1e-5


def test_a_packed_window_equals_a_chat_with_one_question(backbone, batch):
    model, processor = backbone
    episode = batch.episodes[1]
    with torch.no_grad():
        packed = answer_logits(model, batch, batch.mask)[1]
        for at in (0, 23):
            content = [part for frame in episode.frames for part in frame.content]
            content.append({"type": "text", "text": batch.questions[1][at].text})
            messages = [
                {"role": "system", "content": testbed.SYSTEM},
                {"role": "user", "content": content},
            ]
            inputs = processor.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            alone = model(**inputs).logits[0, -1]
            assert (alone - packed[at]).norm() / alone.norm() < 1e-4


def test_kv_from_a_prefill_equals_one_forward(backbone, batch, kv):
    model, _ = backbone
    full, _ = kv
    once = answer_logits(model, batch, batch.mask, embed(model, batch))
    cached = reuse.ask(model, batch, full.layers, full.embeddings)
    assert (once - cached).norm() / once.norm() < 1e-4


def test_an_mp4_gives_the_same_answers(backbone, tmp_path):
    model, processor = backbone
    episode = testbed.World(HELD_OUT).episode(700, layout="LPLI")
    asked = [episode.questions[i] for i in (0, 5, 10, 35, 65, 70)]
    testbed.render_video(episode.frames, tmp_path / "frames.mp4")
    decoded = testbed.read_frames(tmp_path / "frames.mp4")
    drawn = [frame.image for frame in episode.frames]
    assert [image.size for image in decoded] == [image.size for image in drawn]
    texts = [question.text for question in asked]
    answers = chat_answers(model, processor, decoded, episode, texts)
    assert answers == chat_answers(model, processor, drawn, episode, texts)
    assert answers == [question.answer for question in asked]


def test_the_directory_is_an_ordinary_model_directory():
    directory = testbed.weights_dir()
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype="float32")
    ours, _ = testbed.load()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))
    assert sum(path.stat().st_size for path in Path(directory).iterdir()) <= 8_000_000
    assert not ours.training and ours.dtype == torch.float32


def test_an_additive_mask_hides_what_a_boolean_one_hides():
    mask = torch.tensor([[True, False], [True, True]])
    assert additive(mask).softmax(-1).tolist() == [[1.0, 0.0], [0.5, 0.5]]
