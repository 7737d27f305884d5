"""Recipes in the pages of MLA: latents and rotary keys, an engine in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.testbed import World
from tests.engines.vllm.engine import apart, bound, greedy, latents_directory, prompt, start

FULL = ReusePolicy(forms="always", rank=512, patch_bytes=None)
DEFAULT = ReusePolicy(forms="always")
BLIND = ReusePolicy(on_miss="blind")


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    where, model = tmp_path_factory.mktemp("store"), latents_directory(tmp_path_factory.mktemp("model"))
    # vLLM's own rotary operator of the CPU garbles the rotary keys of MLA, and its attention for processors
    # with AMX takes no float32
    plain = {"compilation_config": {"custom_ops": ["none"]}, "attention_backend": "CPU_MLA"}
    llm = start(model, where, block_size=16, **plain)
    return llm, Backbone.from_pretrained(model, dtype="float32", by_files=True).engine, ChunkStore.open(where)


def outcomes(bed, episodes, policy, questions):
    """(wanted, cold, served, library's answer) of questions behind windows of texts."""
    llm, backbone, store = bed
    for number in episodes:
        episode = World(800_000).episode(number, layout="llli")
        chunks = [backbone.chunk(frame.content) for frame in episode.frames]
        first = KameraWindow(backbone, store, policy=policy)
        for chunk in chunks:
            first.append(chunk)
        first.slide(len(chunks))
        first.flush()
        window = KameraWindow(backbone, store, policy=policy)
        for chunk in chunks:
            window.append(chunk)
        tail, recipe, asked = backbone.builder.seams(None).tail, window.recipe(), bound(episode)[:questions]
        prompts = [
            prompt([*recipe.ids, *backbone.builder.question_ids(q.text, tail).tolist()]) for q in asked
        ]
        cold = llm.generate([{**p, "cache_salt": "cold"} for p in prompts], greedy(), use_tqdm=False)
        served = llm.generate(prompts, greedy(recipe.to_json()), use_tqdm=False)
        for question, one, other in zip(asked, cold, served, strict=True):
            assert other.num_cached_tokens >= len(recipe.ids) - 16
            yield question.answer, one, other, window.generate(question.text, max_new_tokens=4)


def test_full_rank_patches_of_latents_give_the_engines_own_answers(bed):
    found = list(outcomes(bed, range(26), FULL, 4))
    assert len(found) >= 100
    assert all(cold.outputs[0].token_ids == served.outputs[0].token_ids for _, cold, served, _ in found)
    assert max(apart(cold, served) for _, cold, served, _ in found) <= 5e-5  # see docs/vllm.md


@pytest.mark.slow
def test_default_patches_of_latents_answer_as_the_library_and_blind_reuse_does_not(bed):
    found = list(outcomes(bed, range(100, 108), DEFAULT, 4))
    same = [served.outputs[0].text == library for _, _, served, library in found]
    assert sum(same) / len(same) >= 0.95
    blind = list(outcomes(bed, range(200, 208), BLIND, 4))
    right = [served.outputs[0].text == wanted for wanted, _, served, _ in blind]
    assert sum(right) / len(right) <= 0.15  # the backbone itself answers .84 of such questions
