"""A saved session goes on in another process, pictures included, and is then edited there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kamera import ChunkStore
from kamera.edits import Directive
from kamera.errors import CorruptChunk, IncompatibleChunk, StoreError
from kamera.sessions import ChatSession
from tests.content.templates import picture, screens
from tests.engines.compare import relative
from tests.killing import in_child
from tests.sessions.rig import FULL, plain_logits, seeing, session, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}


def _saved(path: Path, backbone=None, messages=None, **options) -> ChatSession:
    chat = session(backbone or seeing(), **options)
    chat.send(messages or screens(3), **GREEDY)
    chat.save(path)
    return chat


def _loaded(path: Path, backbone=None, tenant: str = "", **options) -> ChatSession:
    store = ChunkStore.open("memory://", tenant=tenant)
    return ChatSession.load(path, backbone or seeing(), store, **options)


def test_another_process_goes_on_and_edits_it(tmp_path):
    in_child(lambda _: _saved(tmp_path / "s") and None)
    chat = _loaded(tmp_path / "s", seeing.__wrapped__())  # a backbone that has seen nothing
    pictures = [i["image"] for m in chat.messages if isinstance(m["content"], list) for i in m["content"][1:]]
    assert [p.tobytes() for p in pictures] == [picture(i).tobytes() for i in range(3)]
    turn = chat.send("go on", **GREEDY)
    assert turn.report.vision_encodes == 0 and turn.report.forwards <= 1, turn
    edit = chat.edit([Directive(1, 3, unit="messages", mode="forget")])
    assert edit.vision_encodes == 0 and edit.left > 20, edit
    wanted = plain_logits(chat.backbone, chat.messages)
    assert relative(chat.next_token_logits(chat.messages), wanted) <= 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["forget", "amortize"])
def test_a_loaded_session_answers_bit_for_bit_like_the_saved(tmp_path, mode):
    chat = _saved(tmp_path / "s", policy=FULL, mode=mode)
    chat.edit([Directive(1, 3, unit="messages", mode=mode)])
    chat.save(tmp_path / "s")
    again = _loaded(tmp_path / "s")
    assert (again.manner.mode, len(again.messages)) == (mode, len(chat.messages))
    assert torch.equal(again.prompt_ids, chat.prompt_ids)
    assert [s.guarantee for s in again.window.slots] == [s.guarantee for s in chat.window.slots]
    assert torch.equal(again.next_token_logits("next?"), chat.next_token_logits("next?"))


def test_another_model_or_tenant_is_refused(tmp_path):
    _saved(tmp_path / "s")
    with pytest.raises(IncompatibleChunk, match="fingerprint"):
        _loaded(tmp_path / "s", speaking("headers"))
    with pytest.raises(IncompatibleChunk, match="tenant"):
        _loaded(tmp_path / "s", tenant="other")


def test_every_damaged_or_missing_file_is_refused_by_name(tmp_path):
    path = tmp_path / "s"
    _saved(path)
    files = [f for f in path.rglob("*") if f.is_file()]
    assert len(files) == 1 + 3 + 1
    for file in files:
        whole = file.read_bytes()
        for at in (0, len(whole) // 3, len(whole) // 2, len(whole) - 2):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CorruptChunk):
                _loaded(path)
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CorruptChunk):
            _loaded(path)
        file.unlink()
        with pytest.raises((CorruptChunk, StoreError)):
            _loaded(path)
        file.write_bytes(whole)
    assert _loaded(path).window is not None


def test_a_save_that_fails_leaves_the_session_saved_before(tmp_path, monkeypatch):
    path = tmp_path / "s"
    chat = _saved(path)
    before = chat.messages
    chat.send("more", **GREEDY)
    replace = os.replace

    def full(source, target, **folders):
        if target == "session.safetensors":
            raise OSError(28, "No space left on device")
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        chat.save(path)
    assert len(_loaded(path).messages) == len(before)
    monkeypatch.undo()
    chat.save(path)
    assert len(_loaded(path).messages) == len(before) + 2
    assert len(list(path.glob("window-*"))) == 1
