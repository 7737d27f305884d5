"""Any turn can be gone on from, whatever came after it: a branch has none of that, in words or in KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChatSession, ChunkStore
from kamera.content import common_prefix
from kamera.errors import UnknownSession, UnknownTurn
from kamera.sessions import SessionPool
from kamera.sessions.layout import OF_THE_PROMPT
from tests.content.templates import picture
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, FULL, seeing, session, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}
SYSTEM = {"role": "system", "content": "You use a computer."}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def fresh(backbone, messages) -> ChatSession:
    """The slow way: a session of its own that has seen nothing else."""
    return session(backbone, EXACT, mode="forget")


def check_fresh(chat: ChatSession, turn, asked: list[dict]) -> None:
    """The answer, and what the window says next, are those of a session that has seen ``asked`` alone."""
    other = fresh(chat.backbone, asked)
    assert other.send(asked, **GREEDY).text == turn.text
    wanted, found = other.next_token_logits("next?"), chat.fork().next_token_logits("next?")
    assert relative(found, wanted) <= 1e-4


def test_a_branch_holds_nothing_of_the_turns_behind_its_own():
    chat = session(speaking("headers"))
    one = chat.send([SYSTEM, user("hello")], **GREEDY)
    two = chat.send("the word is lamp", **GREEDY)
    there, second = chat.messages, chat.prompt_ids.tolist()
    three = chat.send("which word?", after=one.turn_id, **GREEDY)
    asked = [SYSTEM, user("hello"), said(one.text), user("which word?")]
    assert chat.messages == [*asked, said(three.text)] and "lamp" not in str(chat.messages)
    check_fresh(chat, three, asked)
    ids = chat.prompt_ids.tolist()
    assert three.report.prefilled == len(ids) - common_prefix(ids, second) and three.report.left == 0
    back = chat.send("and now?", after=two.turn_id, **GREEDY)
    assert chat.messages[:-2] == there
    check_fresh(chat, back, [*there, user("and now?")])


def test_a_turn_that_is_unknown_deleted_or_anothers_is_refused_by_name():
    chat, other = session(speaking("headers")), session(speaking("headers"))
    one, theirs = chat.send("hello", **GREEDY), other.send("hello", **GREEDY)
    chat.send("more", **GREEDY)
    chat.delete(one.turn_id)
    before = chat.messages
    for name in ("nobody", theirs.turn_id, one.turn_id):
        with pytest.raises(UnknownTurn, match=f"no turn '{name}' here"):
            chat.send("x", after=name, **GREEDY)
        with pytest.raises(UnknownSession):
            chat.history(name)
    assert chat.messages == before


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(3))
def test_a_turn_leaves_from_the_middle_and_those_behind_it_stay(number):
    chat, turns = session(speaking("headers")), []
    for text in ("first of all", "then this", "at last"):
        turns.append(chat.send([SYSTEM, user(text)] if not turns else text, **GREEDY))
    whole = chat.messages
    chat.delete(turns[number].turn_id)
    chat.delete(turns[number].turn_id)  # again: nothing more to do
    left = [m for i, m in enumerate(whole) if i not in (1 + 2 * number, 2 + 2 * number)]
    assert chat.messages == left
    turn = chat.send("so?", **GREEDY)
    check_fresh(chat, turn, [*left, user("so?")])
    if number < 2:
        assert chat.history(turns[2].turn_id) == left


# -- pools -----------------------------------------------------------------------------------------


def pool(backbone=None, policy=EXACT, store=None, **options) -> SessionPool:
    return SessionPool(
        backbone or speaking("headers"), store or ChunkStore.open("memory://"), policy=policy, **options
    )


def test_turns_are_their_tenants_alone_and_two_pools_may_share_them():
    stores = {name: ChunkStore.open("memory://", tenant=name) for name in "ab"}
    branches: dict = {}
    of, other = (pool(store=stores.__getitem__, branches=branches) for _ in range(2))
    one = of.send("hello", None, "a", **GREEDY)
    with pytest.raises(UnknownTurn, match="no turn"):
        of.send("x", None, "b", after=one.turn_id, **GREEDY)
    with pytest.raises(UnknownTurn):
        of.delete(one.turn_id, "b")
    assert of.metrics().requests == 1 and len(of) == 1
    turn = other.send("more", None, "a", after=one.turn_id, **GREEDY)
    check_fresh(other.session(turn.session_id, "a"), turn, [user("hello"), said(one.text), user("more")])


# -- any tree of turns -------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["say", "show", "drop", "take back", "delete"]), st.integers(0, 9)),
    min_size=2,
    max_size=7,
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "mode"),
    [(EXACT, "auto"), (FULL, "amortize"), (FULL, "repair")],
    ids=["exact", "keep", "repair"],
)
@settings(max_examples=4)
@given(steps=STEPS)
def test_every_branch_answers_as_a_session_that_saw_it_alone(policy, mode, steps):
    of = pool(seeing(), policy, mode=mode, min_tokens=1)
    known: dict[str, list[dict]] = {}  # turns, each with its history as it should be
    gone: set[str] = set()
    root = of.send([SYSTEM, user("hello")], **GREEDY)
    known[root.turn_id] = [SYSTEM, user("hello"), said(root.text)]
    behind: dict[str, str | None] = {root.turn_id: None}
    for number, (what, which) in enumerate(steps):
        name = sorted(known, key=list(behind).index)[which % len(known)]
        if what == "delete" and len(known) > 1:
            _delete(of, name, known, behind, gone)
            continue
        new = user(f"word {number % 3}")
        if what == "show":
            new = {"role": "user", "content": [{"type": "image", "image": picture(number % 3)}]}
        history = known[name]
        if (
            what in ("drop", "take back") and len(history) > 4
        ):  # the client edits its past: a history of its own
            history = [*history[:1], *history[3:]] if what == "drop" else history[:-2]
            asked, before = [*history, new], None
            turn = of.send(asked, **GREEDY)
        else:
            asked, before = [*history, new], name
            turn = of.send([new], after=name, **GREEDY)
        known[turn.turn_id], behind[turn.turn_id] = [*asked, said(turn.text)], before
        assert of.history(turn.turn_id) == known[turn.turn_id]
        if turn.report.guarantee in OF_THE_PROMPT:  # else its own conversation dropped something
            check_fresh(of.session(turn.session_id), turn, asked)
        else:
            assert mode == "amortize" and turn.report.mode == "amortize"
    for name in gone:
        with pytest.raises(UnknownTurn):
            of.send("x", after=name, **GREEDY)


def _delete(of, name, known, behind, gone) -> None:
    """Delete a turn, in the pool and in the plain books."""
    own = known[name][-2:]
    inside = {m["content"] if isinstance(m["content"], str) else id(m["content"]) for m in own}
    of.delete(name)
    for turn in [*known]:
        at = turn
        while at is not None and at != name:
            at = behind[at]
        if at == name and turn != name:
            start = len(known[name]) - 2
            assert len(inside) and known[turn][start : start + 2] == own
            del known[turn][start : start + 2]
    gone.add(name)
    del known[name]


# -- what is kept ------------------------------------------------------------------------------------
