"""A fork that changes pays for what differs: counted by `memory`, which sees every block once."""

from __future__ import annotations

import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from tests.models import samples, tiny
from tests.window.rig import QUESTION

FORKS, CHANGED, TOKENS = 64, 4, 24


def blocks(windows: list[KameraWindow]) -> int:
    """Bytes of all blocks of memory that windows hold, those they share once."""
    held: dict = {}
    for window in windows:
        held |= window._holdings().all
    return sum(held.values())


def test_four_forks_of_64_that_recall_cost_what_differs():
    backbone = tiny.backbone("qwen2_5_vl")
    store = ChunkStore.open("memory://")
    window = KameraWindow(backbone, store, torch.arange(5, 13), policy=ReusePolicy(forms="always"))
    chunks = [backbone.chunk_from_tensors(samples.text_ids(TOKENS, seed)) for seed in range(9)]
    for chunk in chunks:
        window.append(chunk)
    window.evict(8)
    window.next_token_logits(QUESTION)
    own, forks = blocks([window]), [window.fork() for _ in range(FORKS)]
    assert blocks([window, *forks]) == own
    answers = [window.next_token_logits(QUESTION)]
    for fork in forks[:CHANGED]:
        assert fork.recall(chunks[8].id).forwards == 0
        answers.append(fork.next_token_logits(QUESTION))
    differs = TOKENS * backbone.facts.bytes_per_token
    # a chunk and its patch each, at most: no room but the one
    assert blocks([window, *forks]) - own <= CHANGED * 2 * differs
    assert {w._stage.live.tensors[0]["k"].data_ptr() for w in (window, *forks)} == {
        window._stage.live.tensors[0]["k"].data_ptr()
    }
    again = [w.next_token_logits(QUESTION) for w in (window, *forks[:CHANGED])]
    assert all(torch.equal(a, b) for a, b in zip(answers, again, strict=True))
    assert all(torch.equal(a, answers[1]) for a in answers[2:])
    assert not torch.equal(answers[0], answers[1])
