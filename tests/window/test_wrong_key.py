"""A window on an encrypted store whose key was not given: it prefills, and changes nothing there."""

from __future__ import annotations

import logging

import pytest

from kamera.errors import WrongKey
from kamera.store import ChunkStore, StoreAdmin
from tests.engines.compare import relative
from tests.window.rig import QUESTION, make, rig

SECRET, KEY, STRAY = b"a secret of acme, 32 bytes long!", b"k" * 32, b"s" * 32


def test_answers_are_those_of_a_prefill_and_the_objects_stay(tmp_path, caplog):
    backbone, chunks = rig("qwen2_5_vl", 3)
    with ChunkStore.open(tmp_path / "s", secret=SECRET, keys=[KEY]) as store:
        make(backbone, store, *chunks)
        held = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.safetensors")}
    reference = make(backbone, None, *chunks).next_token_logits(QUESTION)
    with (
        ChunkStore.open(tmp_path / "s", secret=SECRET, keys=[STRAY]) as store,
        caplog.at_level(logging.WARNING, "kamera"),
    ):
        window = make(backbone, store, *chunks)
        assert [slot.guarantee for slot in window.slots] == ["exact"] * len(chunks)
        assert relative(window.next_token_logits(QUESTION), reference) <= 1e-5
        assert "keys=" in caplog.text
        window.slide()
        with pytest.raises(WrongKey):
            window.recall(chunks[0].id)
    canonicals = {path for path, data in held.items() if path.read_bytes() == data}
    assert len(canonicals) >= len(chunks)  # a patch may have been formed anew
    with ChunkStore.open(tmp_path / "s", secret=SECRET, keys=[KEY, STRAY]) as store:
        assert StoreAdmin(store).verify().refused == ()
        window = make(backbone, store, *chunks)
        assert relative(window.next_token_logits(QUESTION), reference) <= 1e-4
