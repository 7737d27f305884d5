"""A saved session goes on in another process, pictures included, and is then edited there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from kamera import ChunkStore, Clip
from kamera.edits import Directive, name_of, policies
from kamera.errors import CorruptChunk, IncompatibleChunk, StoreError, StoreVersionError
from kamera.sessions import ChatSession
from kamera.sessions.document import SESSION, sign_document
from tests.content.templates import AGENT, TALK, TOOLS, picture, screens
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


def test_tools_clips_and_empty_sessions_are_saved(tmp_path):
    chat = _saved(tmp_path / "tools", speaking("thinking"), AGENT, tools=TOOLS)
    again = _loaded(tmp_path / "tools", chat.backbone)
    assert again.manner.tools == TOOLS and again.messages == chat.messages
    empty = session(speaking("thinking"))
    frames = tuple(picture(i) for i in range(2))
    clip = {"type": "video", "video": Clip(frames, (0, 5), (7.0, 7.5), 10.0, 30, 7.0)}
    empty.state = type(empty.state)(messages=({"role": "user", "content": [clip]},))
    empty.save(tmp_path / "clip")
    (item,) = _loaded(tmp_path / "clip", speaking("thinking")).messages[0]["content"]
    held = item["video"]
    assert (held.indices, held.seconds, held.start) == ((0, 5), (7.0, 7.5), 7.0)
    assert (held.fps, held.total_frames) == (10.0, 30)
    assert [f.tobytes() for f in held.frames] == [f.tobytes() for f in frames]


def test_keys_keep_their_order_for_the_template(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": 2}}}
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}, TALK[2]]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    chat = _saved(tmp_path / "s", speaking("thinking"), talk, tools=tools)
    again = _loaded(tmp_path / "s", chat.backbone)
    assert torch.equal(again.render().ids, chat.render().ids)


def test_another_model_or_tenant_is_refused(tmp_path):
    _saved(tmp_path / "s")
    with pytest.raises(IncompatibleChunk, match="fingerprint"):
        _loaded(tmp_path / "s", speaking("headers"))
    with pytest.raises(IncompatibleChunk, match="tenant"):
        _loaded(tmp_path / "s", tenant="other")


def keeps_one(messages, turn):
    return policies.keep_last_images(1)(messages, turn)


@dataclasses.dataclass
class KeepsSome:
    """A policy by its ``transform``."""

    count: int

    def transform(self, messages, turn):
        return policies.keep_last_images(self.count)(messages, turn)


@pytest.mark.parametrize(
    ("policy", "given", "others"),
    [
        (policies.keep_last_images(1, batch=1), None, [policies.keep_last_images(2), policies.keep_all()]),
        (policies.clear_tool_results(2, exclude={"b", "a"}), None, [policies.clear_tool_results(2)]),
        (keeps_one, keeps_one, [None, policies.keep_last_images(1), KeepsSome(1)]),
        (KeepsSome(1), KeepsSome(1), [None, KeepsSome(2)]),
        (policies.summarise(1, 2, str), policies.summarise(1, 2, str), [None, policies.summarise(1, 2)]),
        (None, None, [policies.keep_all()]),
    ],
    ids=["ours", "a set", "function", "object", "given code", "none"],
)
def test_a_session_is_loaded_under_the_edit_policy_it_had(tmp_path, policy, given, others):
    _saved(tmp_path / "s", edit_policy=policy)
    for other in others:
        with pytest.raises(IncompatibleChunk, match="was saved under edit policy"):
            _loaded(tmp_path / "s", edit_policy=other)
    again = _loaded(tmp_path / "s", edit_policy=given)
    assert (again.edit_policy is None) == (policy is None)
    again.edit_policy = policies.keep_last_images(2)  # from here on
    again.save(tmp_path / "s")
    assert name_of(_loaded(tmp_path / "s").edit_policy) == name_of(policies.keep_last_images(2))


def test_what_a_policy_dropped_stays_dropped_when_its_session_goes_on_from_the_disk(tmp_path):
    chat = _saved(tmp_path / "s", edit_policy=policies.keep_last_images(1))
    again = _loaded(tmp_path / "s")
    with chat.backbone.measure() as work:
        one = chat.send("go on", **GREEDY)
    with chat.backbone.measure() as loaded_work:
        other = again.send("go on", **GREEDY)
    assert other.text == one.text
    assert loaded_work.tokens <= work.tokens + 16, "its answer's KV was not saved"
    assert (loaded_work.vision_encodes, other.report.left) == (work.vision_encodes, one.report.left)


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


def test_another_format_and_other_directories_are_refused(tmp_path):
    path = tmp_path / "s"
    chat = _saved(path)
    body = SESSION.read(path).document
    SESSION.publish(path, sign_document({**body, "version": 99}, chat.store))
    with pytest.raises(StoreVersionError, match="session format 99"):
        _loaded(path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match=r"notes\.txt"):
        chat.save(tmp_path / "mine")
    with pytest.raises(StoreError, match="no saved session"):
        _loaded(tmp_path / "nowhere")


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


def test_a_message_that_json_cannot_hold_is_refused(tmp_path):
    chat = _saved(tmp_path / "s", speaking("headers"), TALK[:1])
    chat.send([{**TALK[0], "when": object()}], **GREEDY)
    with pytest.raises(ValueError, match="user message cannot be saved"):
        chat.save(tmp_path / "s")
    assert _loaded(tmp_path / "s", chat.backbone).messages[0] == TALK[0]


def test_a_loaded_session_equals_an_uncached_run(tmp_path):
    _saved(tmp_path / "s")
    chat = _loaded(tmp_path / "s")
    history = chat.messages
    del history[3:5]
    assert relative(chat.next_token_logits(history), plain_logits(chat.backbone, history)) <= 1e-4
