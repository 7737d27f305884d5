"""The price of turns under the default policy, counted by hooks of the test: at most a prefix cache's."""

from __future__ import annotations

import pytest
import torch

from kamera import ChatSession, ChunkStore, KameraWindow, ReusePolicy, SessionPool, testbed
from kamera.content import common_prefix
from kamera.edits import policies
from kamera.engines.hf import HfEngine
from kamera.trust import weakest
from kamera.window import Arrange
from tests.models import tiny
from tests.window.rig import watching

DEFAULT = ReusePolicy()
"""The policy of users: the other tests of this process are about windows that need no certificate."""

OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
ANSWER = 3  # forwards of an answer of four tokens behind its prompt


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    return [frame.image for frame in testbed.World(seed=3).episode(0, legends=6).frames]


def shown(picture, text: str = "What is the value of tag 3?") -> dict:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


class Heard:
    """A streamer that keeps all tokens it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        pass


@pytest.mark.few(1)
@pytest.mark.parametrize("pictures", [True, False])
def test_an_appended_chat_runs_what_a_kept_cache_runs_in_one_forward_before_the_answer(
    backbone, frames, pictures
):
    """A kept cache holds the prompt and the answer but for its last token, which nothing followed."""
    session = ChatSession(backbone, ChunkStore.open("memory://"), policy=DEFAULT)
    held: list[int] = []
    for i, frame in enumerate(frames):
        heard = Heard()
        with watching(backbone) as seen:
            turn = session.send(shown(frame) if pictures else f"value of tag {i}?", streamer=heard, **OPTIONS)
            session.flush()
        prompt = session.prompt_ids.tolist()
        new = len(prompt) - common_prefix(prompt, held)
        assert seen.spans == [new, *[1] * ANSWER], "all that is new with the question, then the answer"
        assert seen.encodes == int(pictures)
        assert turn.usage.cached_tokens == len(prompt) - new
        held = heard.ids[:-1]
    assert common_prefix(prompt, held) == len(prompt), "the streamer heard the prompt first"


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", [1, 3])
def test_whatever_leaves_amortize_runs_what_the_conversation_adds(backbone, frames, keep):
    """Pictures leave, the texts beside them and all answers stay: none of these runs again."""
    policy, edit = ReusePolicy(), policies.keep_last_images(keep)
    session = ChatSession(
        backbone, ChunkStore.open("memory://"), policy=policy, edit_policy=edit, mode="amortize"
    )
    unedited, held = ChatSession(backbone, ChunkStore.open("memory://"), policy=ReusePolicy.exact()), 0
    for i, frame in enumerate(frames):
        with watching(backbone) as seen:
            session.send(shown(frame), **OPTIONS)
        plain = unedited._conversations.render(session.messages[:-1])
        new, held = plain.num_tokens - held, plain.num_tokens + ANSWER
        spans = seen.spans[: len(seen.spans) - ANSWER]
        assert sum(spans) <= new
        assert i < keep or weakest(slot.guarantee for slot in session.window.slots) != "exact"


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", [1, 3])
def test_an_agent_that_keeps_the_last_pictures_pays_no_more_than_a_prefix_cache(backbone, frames, keep):
    """Before the answer: the tokens behind the first change of the prompt, in at most two forwards."""
    edit = policies.keep_last_images(keep)
    session = ChatSession(backbone, ChunkStore.open("memory://"), policy=DEFAULT, edit_policy=edit)
    before = torch.empty(0, dtype=torch.int64)
    for i, frame in enumerate(frames):
        with watching(backbone) as seen:
            session.send(shown(frame), **OPTIONS)
        prompt = session.prompt_ids
        same = int((prompt[: len(before)] == before[: len(prompt)]).long().cumprod(0).sum()) if i else 0
        spans = seen.spans[: len(seen.spans) - ANSWER]
        assert sum(spans) <= len(prompt) - same
        assert len(spans) == 1
        session.flush()
        before = prompt


def test_the_account_of_a_session_equals_hooks_on_the_model(backbone, frames):
    with watching(backbone, later=True) as seen:
        session = ChatSession(
            backbone,
            ChunkStore.open("memory://"),
            policy=ReusePolicy(audit=1.0),
            edit_policy=policies.keep_last_images(2),
        )
        turns = [session.send(shown(frame), **OPTIONS) for frame in frames]
        session.flush()
        usage = session.usage()
    assert usage.background.forwards > 0, "audits and archives are background work"
    assert usage.now.forwards + usage.background.forwards == seen.forwards
    assert usage.now.tokens + usage.background.tokens == seen.tokens
    assert usage.now.vision_encodes + usage.background.vision_encodes == seen.encodes
    for turn in turns:
        assert turn.usage.completion_tokens == 4
        assert turn.usage.cached_tokens == turn.usage.prompt_tokens - turn.report.prefilled


def test_the_account_of_a_pool_and_of_forks_equals_hooks_on_the_model(backbone, frames):
    with watching(backbone, later=True) as seen:
        pool = SessionPool(backbone, ChunkStore.open("memory://"), policy=DEFAULT)
        for name in ("one", "other"):
            pool.send([shown(frames[0])], session_id=name, **OPTIONS)
            pool.send(shown(frames[1]), session_id=name, **OPTIONS)
        pool.flush()
    usage = pool.usage()
    assert usage.now.forwards + usage.background.forwards == seen.forwards
    with watching(backbone, later=True) as seen:
        window = KameraWindow(backbone, ChunkStore.open("memory://"), "You watch a camera.", policy=DEFAULT)
        for frame in frames[:3]:
            window.append(frame)
        branch = window.fork()
        window.slide()
        branch.reorder([2, 1, 0])
        branch.reorder([2, 1, 0])
        branch.reorder([2, 1, 0])
        for each in (window, branch):
            each.flush()
    total = [w.usage() for w in (window, branch)]
    assert sum(u.now.tokens + u.background.tokens for u in total) == seen.tokens
    assert sum(u.now.forwards + u.background.forwards for u in total) == seen.forwards


@pytest.mark.few(5)
@pytest.mark.parametrize("family", tiny.of_each_kind(sorted(tiny.FAMILIES)))
def test_adjacent_pieces_of_any_family_share_a_forward_and_equal_the_plain_model(family):
    from tests.window.rig import SYSTEM, Prefilled, live, rig, worst

    own, chunks = rig(family)
    window = KameraWindow(own, ChunkStore.open("memory://"), SYSTEM, policy=ReusePolicy.exact())
    with watching(own) as seen:
        report = window.run(Arrange(chunks))
    assert seen.forwards == report.forwards
    assert report.forwards == 1 or not own.facts.joins
    plain = Prefilled(own, chunks)
    assert max(worst(live(window, i), plain.kv(i)) for i in range(len(chunks))) <= 1e-4


@pytest.mark.parametrize("mode", ["amortize", "auto"])
def test_a_client_without_an_id_whose_answers_are_not_ours_pays_for_what_is_new(backbone, mode):
    """Old messages leave its history at each step, and its id and our answers tell nobody whose it is."""
    pool = SessionPool(backbone, ChunkStore.open("memory://"), mode=mode)
    system = {"role": "system", "content": "You watch tags."}
    full, run, cached, seen = [system], 0, 0, [list[int]()]
    for step in range(10):
        text = f"Step {step}: tag 3 was moved from value {step} to value {step + 5}. What is its value?"
        full.append({"role": "user", "content": text})
        history = [system, *full[1:][-5:]]
        with watching(backbone) as counted:
            turn = pool.send(history, **OPTIONS)
            before_answer = counted.tokens - ANSWER
        pool.flush()
        window = pool.session(turn.session_id).window
        assert weakest(slot.guarantee for slot in window.slots) == "exact"
        prompt = pool.session(turn.session_id).prompt_ids.tolist()[: turn.usage.prompt_tokens]
        assert turn.usage.prompt_tokens - turn.usage.cached_tokens == before_answer
        if step > 4:  # its habit is known
            run += before_answer
            cached += len(prompt) - max(common_prefix(prompt, other) for other in seen)
        seen.append(prompt)
        full.append({"role": "assistant", "content": f"The client's own words, number {step}."})
    assert run <= 0.6 * cached
