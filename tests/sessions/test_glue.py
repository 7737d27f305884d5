"""Short texts of a conversation run with their neighbours and leave nothing behind; a user's own are kept."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.sessions import showing
from kamera.window import GLUE, Arrange, Evict
from tests.window.rig import watching

DEFAULT = ReusePolicy(audit=0.0)
"""The policy of users; audits are forwards of their own."""

OPTIONS = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
LONG = "value of tag 2? " * GLUE


def shown(picture, text: str) -> dict:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


def answered(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(("text", "kept"), [("value of tag 3?", False), (LONG, True)], ids=["glue", "long"])
@pytest.mark.parametrize("mode", ["repair", "auto"])
def test_a_text_that_comes_back_is_archived_and_patched_only_if_it_is_long(
    backbone, frames, mode, text, kept
):
    """A policy drops the first picture and brings it back: what stands behind it meets both again.

    (What a client takes back was kept: it is served as it was.)
    """
    store = ChunkStore.open("memory://")

    def shows_at_times(messages, turn):
        return [{"role": "user", "content": "look"} if turn % 2 else messages[0], *messages[1:3]]

    session = ChatSession(backbone, store, policy=DEFAULT, mode=mode, edit_policy=shows_at_times)
    session.send([shown(frames[0], "look"), answered("yes"), {"role": "user", "content": text}], **OPTIONS)
    for _ in range(4):
        session.flush()
        session.send("again", **OPTIONS)
    session.flush()
    slots = session.window.slots
    stored = {row.chunk_id for kind in ("canonical", "exact") for row in store.ls(kind)}
    assert (slots[-1].chunk_id in stored) == kept
    assert not [slot for slot in slots if slot.length < GLUE and slot.chunk_id in stored]


@pytest.mark.parametrize(
    ("how", "content"),
    [(how, "text") for how in ("append", "insert", "replace", "arrange")] + [("arrange", "picture")],
)
def test_what_a_user_put_into_a_window_can_be_recalled_in_another_process(
    backbone, frames, tmp_path, how, content
):
    """However it came and however short it is: its caller knows it by its id."""
    new = "a note of the guard" if content == "text" else frames[3]
    with ChunkStore.open(tmp_path / "store") as store:
        window = KameraWindow(backbone, store, testbed.SYSTEM, policy=DEFAULT)
        for frame in frames[:2]:
            window.append(frame)
        if how == "append":
            window.append(new)
        elif how == "insert":
            window.insert(1, new)
        elif how == "replace":
            window.replace(1, new)
        else:
            window.run(Arrange([window[0], new, window[1]]))
        chunk_id = window[-1 if how == "append" else 1].chunk_id
        assert window.plan(Evict(_at(window, chunk_id))).later.forwards >= 1
        window.evict(_at(window, chunk_id))
    with ChunkStore.open(tmp_path / "store") as store:
        later = KameraWindow(backbone, store, testbed.SYSTEM, policy=DEFAULT)
        assert later.recall(chunk_id).vision_encodes == 0


SURVIVORS = ReusePolicy(minimum="survivor", audit=0.0)


def edits(frames) -> list[list[dict]]:
    """Histories of a client: it drops pictures and messages, changes texts, and takes them back."""
    turns = [
        m for n, f in enumerate(frames) for m in (shown(f, f"value of tag {n}?"), answered(f"it is {n}"))
    ]
    texts = [{"role": "user", "content": f"value of tag {n}?"} for n in range(len(frames))]
    whole, ends = turns[:-1], [turns[:1], turns[:3], turns[:5]]
    return [
        *ends,
        whole,
        [texts[0], *whole[1:]],
        [texts[0], whole[1], texts[1], *whole[3:]],
        [*whole[:2], *whole[4:]],
        [whole[0], answered("a changed answer"), *whole[2:]],
        whole,
        [*whole[2:], *turns[-1:], texts[0]],
    ]


@pytest.mark.parametrize(
    ("mode", "policy", "more"),
    [
        ("amortize", SURVIVORS, 3),
        pytest.param("auto", ReusePolicy(audit=0.0), 0, marks=pytest.mark.slow),
        pytest.param("repair", DEFAULT, 0, marks=pytest.mark.slow),
        ("auto", DEFAULT, 0),
        ("forget", ReusePolicy.exact(), 0),
    ],
)
def test_chunks_of_several_segments_run_no_token_more(backbone, frames, mode, policy, more, monkeypatch):
    """Where an edit touches the inside of a chunk, that is cut, or its beginning is taken over.

    Survivors may run the header of a turn, ``more`` tokens: what stands inside a chunk is not taken over.
    """

    def ran() -> tuple[list[int], int]:
        session, tokens = ChatSession(backbone, ChunkStore.open("memory://"), policy=policy, mode=mode), []
        for messages in edits(frames[:4]):
            with watching(backbone) as seen:
                session.send(messages, **OPTIONS)
            tokens.append(seen.tokens)
            session.flush()
        return tokens, len(session.window)

    merged, few = ran()
    monkeypatch.setattr(showing, "stands_apart", lambda window, reuse: True)
    apart, many = ran()
    assert all(a <= b + more for a, b in zip(merged, apart, strict=True)), (merged, apart)
    assert few < many or mode == "forget"


def _at(window: KameraWindow, chunk_id: str) -> int:
    return [slot.chunk_id for slot in window.slots].index(chunk_id)
