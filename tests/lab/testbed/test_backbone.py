"""The shipped backbones: they load, they bind across chunks, and blind reuse loses exactly that."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kamera import testbed
from kamera.testbed.world import TRAINING_SEEDS
from lab.testbed import FAMILIES, load, weights_dir
from lab.testbed.batches import additive, hide_from_questions, isolate, pack
from lab.testbed.evaluate import HELD_OUT, chat_answers
from lab.testbed.scoring import accuracy, answer_logits, some_questions

ITEMS = 3
BAR = {"gqa": (0.95, 0.9), "deepstack": (0.98, 0.95), "mla": (0.95, 0.85), "mha": (0.85, 0.75)}
"""Two and three hops that a full prefill answers at least; the model card has what is reached."""

every_family = pytest.mark.parametrize("name", list(FAMILIES))


@pytest.mark.slow
@every_family
def test_prefill_answers_right_and_blind_reuse_wrong(name):
    model, processor = load(name)
    assert HELD_OUT < TRAINING_SEEDS
    episodes = [testbed.World(HELD_OUT).episode(600 + i, layout="LLRI") for i in range(8)]
    masks = {"full": lambda b: b.mask, "blind": lambda b: isolate(b, [ITEMS])}
    masks["evicted"] = lambda b: hide_from_questions(b, range(ITEMS))
    scores = accuracy(FAMILIES[name], model, processor.tokenizer, episodes, masks)
    two, three = BAR[name]
    assert scores["full"]["2 hops"] >= two and scores["full"]["3 hops"] >= three
    assert scores["full"]["glyph"] >= 0.95 and scores["full"]["colour"] >= 0.95
    assert scores["evicted"]["2 hops"] >= two - 0.05, "the binding is not in the items frame's KV"
    assert max(scores["blind"]["2 hops"], scores["blind"]["3 hops"]) <= 0.2
    assert scores["blind"]["glyph"] >= 0.9


def test_blind_answers_are_the_defaults():
    model, processor = load()
    family = FAMILIES["gqa"]
    rng = np.random.default_rng(0)
    episodes = [testbed.World(HELD_OUT).episode(500 + i, layout="LLRI") for i in range(8)]
    asked = [some_questions(e, 24, rng, ("value",), (1.0,)) for e in episodes]
    batch = pack(family, model, processor.tokenizer, episodes, asked, testbed.SYSTEM)
    said = answer_logits(family, model, batch, isolate(batch, [ITEMS])).argmax(-1)
    alone = [
        processor.tokenizer.convert_tokens_to_ids(episode.answer(question, [ITEMS]))
        for episode, row in zip(batch.episodes, batch.questions, strict=True)
        for question in row
        if question.bound
    ]
    bound = torch.tensor([[q.bound for q in row] for row in batch.questions])
    assert (said[bound] == torch.tensor(alone)).float().mean() >= 0.8


@pytest.mark.slow
@every_family
def test_a_packed_window_equals_a_chat_with_one_question(name):
    """Of several questions behind pictures and text, each reads as if it were the only one."""
    model, processor = load(name)
    family = FAMILIES[name]
    # LLaVA's own processor counts the tokens of all pictures by the size of the largest
    layout = "rI" if name == "mha" else "LrI"
    episodes = [testbed.World(HELD_OUT).episode(500 + i, layout=layout) for i in range(2)]
    asked = [e.questions[:4] for e in episodes]
    batch = pack(family, model, processor.tokenizer, episodes, asked, testbed.SYSTEM)
    packed = answer_logits(family, model, batch, batch.mask)[1]
    content = [part for frame in episodes[1].frames for part in frame.content]
    for at in (0, 3):
        question = {"type": "text", "text": asked[1][at].text}
        messages = [
            {"role": "system", "content": testbed.SYSTEM},
            {"role": "user", "content": [*content, question]},
        ]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = [part["image"] for part in content if part["type"] == "image"]
        with torch.no_grad():
            alone = model(**processor(images=images, text=prompt, return_tensors="pt")).logits[0, -1]
        assert (alone - packed[at]).norm() / alone.norm() < 1e-4


@pytest.mark.slow
def test_an_mp4_gives_the_same_answers(tmp_path):
    model, processor = load()
    episode = testbed.World(HELD_OUT).episode(700, layout="LPRI")
    asked = [episode.questions[i] for i in (0, 5, 10, 35, 50, 62)]
    testbed.render_video(episode.frames, tmp_path / "frames.mp4")
    decoded = testbed.read_frames(tmp_path / "frames.mp4")
    drawn = [frame.image for frame in episode.frames]
    assert [image.size for image in decoded] == [image.size for image in drawn]
    texts = [question.text for question in asked]
    answers = chat_answers(model, processor, decoded, episode, texts)
    assert answers == chat_answers(model, processor, drawn, episode, texts)
    assert sum(a == q.answer for a, q in zip(answers, asked, strict=True)) >= 5


@pytest.mark.slow
@every_family
def test_the_directory_is_an_ordinary_model_directory(name):
    directory = weights_dir(name)
    model_class = getattr(transformers, FAMILIES[name].title)
    model = model_class.from_pretrained(directory, dtype=torch.float32)
    ours, _ = load(name)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))
    assert sum(path.stat().st_size for path in Path(directory).iterdir()) <= 8_000_000
    assert not ours.training and ours.dtype == torch.float32


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'mamba'.*gqa, deepstack, mla, mha"):
        load("mamba")


def test_an_additive_mask_hides_what_a_boolean_one_hides():
    mask = torch.tensor([[True, False], [True, True]])
    assert additive(mask).softmax(-1).tolist() == [[1.0, 0.0], [0.5, 0.5]]
