"""A look-up that misses says why: what the chunk is stored for, and what this window is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kamera import Backbone, Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import IncompatibleChunk
from tests.models import processors, tiny

EXACT = ReusePolicy.exact()
SYSTEM = "You watch a camera."


def backbone(dtype: torch.dtype = torch.float32, seed: int = 0, processor: Any = None, **options) -> Backbone:
    model = processors.matching_model(seed)
    tiny.cast(model, dtype)
    return Backbone(model, processor or processors.picture_processor(), **options)


def filled(store: ChunkStore, made: Backbone, system: str = SYSTEM) -> None:
    window = KameraWindow(made, store, system, policy=EXACT)
    window.append("a red car passes the gate")
    window.flush()


def notes(store: ChunkStore, made: Backbone, system: str = SYSTEM) -> tuple[str, ...]:
    return KameraWindow(made, store, system, policy=EXACT).append("a red car passes the gate").notes


OTHERS = {
    "dtype": (dict(dtype=torch.bfloat16), "stored for dtype float32, this backbone is bfloat16"),
    "variant": (dict(variant="steered-0.7"), "stored for variant none, this backbone is steered-0.7"),
    "weights": (dict(seed=1), "stored for other weights"),
    "template": (
        dict(processor=processors.picture_processor(processors.CHATML + " ")),
        "stored for other processor settings",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("options, reason", OTHERS.values(), ids=OTHERS)
def test_another_backbone_says_what_differs(tmp_path, options, reason, caplog):
    with ChunkStore.open(tmp_path / "store") as store:
        filled(store, backbone())
        with caplog.at_level(logging.WARNING, "kamera"):
            said = notes(store, backbone(**options))
    assert [note for note in said if note.endswith(f"not for this window: {reason}")] == list(said)
    assert len(said) == 1 and caplog.text.count(reason) == 1


def test_another_system_prompt_is_named_and_the_same_one_hits(caplog):
    store, made = ChunkStore.open("memory://"), backbone()
    filled(store, made)
    assert notes(store, made) == ()
    (note,) = notes(store, made, "You watch another camera.")
    assert note.endswith("not for this window: another system prompt")
    assert caplog.text.count("another system prompt") == 1


def test_a_recall_by_id_says_what_differs(tmp_path):
    store, made = ChunkStore.open(tmp_path / "store"), backbone()
    filled(store, made)
    chunk: Chunk = made.chunk("a red car passes the gate")
    window = KameraWindow(backbone(torch.bfloat16), store, SYSTEM, policy=EXACT)
    with pytest.raises(IncompatibleChunk, match=r"\(stored for dtype float32, this backbone is bfloat16\)"):
        window.recall(chunk.id)
