"""Where survivors are served, a text takes over KV of texts that left in its place, and of an answer."""

from __future__ import annotations

import pytest
import torch

from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.content import Encoded
from kamera.engines import Span
from kamera.ops import kv_concat, kv_slice, kv_tokens, relocate_kv
from kamera.window import Arrange, Plan, former_of, respond
from tests.engines.compare import worst
from tests.models import samples
from tests.window.rig import FULL_RANK, GREEDY, QUESTION, guarantees, live, make, rig

LAX = ReusePolicy(minimum="near", rank=FULL_RANK)
FAMILIES = ["qwen2_5_vl", "gemma3", "deepseek_v3", "llama_mqa"]
FIRST, SECOND, MORE = (samples.text_ids(n, seed=s) for n, s in ((9, 31), (12, 32), (3, 33)))
NEW = 4
OPTIONS = {**GREEDY, "max_new_tokens": NEW, "min_new_tokens": NEW}


def text(backbone, *spans: torch.Tensor) -> Chunk:
    return backbone.chunk_from_tensors(torch.cat(spans), label="text")


def opened(family: str, policy: ReusePolicy = LAX) -> tuple[KameraWindow, list[Chunk]]:
    """A window of a text, a picture, a text and another picture, as an agent's message and its next."""
    backbone, (a, b, *_) = rig(family)
    chunks = [text(backbone, FIRST), a, text(backbone, SECOND), b]
    return make(backbone, None, *chunks, policy=policy), chunks


def whole(window: KameraWindow, *more: Chunk) -> Chunk:
    """The two texts as one, with three tokens more."""
    return text(former_of(window).backbone, FIRST, SECOND, MORE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_in_the_place_of_others_runs_its_new_tokens_alone(family):
    """Its KV is theirs, moved from where it was computed, and that of the rest is a forward behind it."""
    window, _ = opened(family)
    layout, axes, new = former_of(window).backbone.layout, former_of(window).backbone.axes, whole(window)
    old = [live(window, i) for i in range(4)]
    starts = [slot.position for slot in window.slots]
    plan = window.plan(Arrange([new, window[3]], on_leave="keep"))
    report = window.run(Arrange([new, window[3]], on_leave="keep"))
    assert (report.forwards, report.tokens_recomputed) == (1, len(MORE))
    assert (plan.cost.forwards, plan.cost.tokens) == (1, len(MORE))
    assert report.bytes_rotated > 0
    assert report.tokens_held == len(FIRST) + len(SECOND)
    made, home = live(window, 0), starts[0]
    moved = relocate_kv(old[2], layout, (home + len(FIRST) - starts[2],) * axes)
    taken = kv_concat([old[0], moved])
    assert worst(kv_slice(made, 0, kv_tokens(taken)), taken) <= 1e-5
    engine, anchor = former_of(window).backbone, former_of(window).anchor
    cache = engine.live()
    cache.show([Span(anchor.kv, None, (0,) * axes), Span(taken, None, (0,) * axes)], room=len(MORE))
    places = torch.arange(home + kv_tokens(taken), home + new.num_tokens).expand(axes, -1)
    rest = engine.prefill([Encoded(MORE, {}, {})], [places], cache)[0]
    assert worst(kv_slice(made, kv_tokens(taken), new.num_tokens), rest) <= 1e-4
    assert guarantees(window)[0] == "survivor"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_taken_over_while_what_it_knew_leaves(family):
    window, chunks = opened(family)
    respond(window, QUESTION, Arrange(window.slots), **OPTIONS)
    said = window._state.said
    spoken = text(former_of(window).backbone, said.facts.encoded.input_ids, MORE)
    there = window.slots[-1].position, said.copy.positions
    report = window.run(Arrange([*window.slots[:2], window[3], spoken], on_leave="keep"))
    assert (report.forwards, report.tokens_recomputed) == (1, len(MORE))
    slot = window.slots[-1]
    assert (slot.guarantee, slot.antecedents) == ("survivor", tuple(c.id for c in chunks))
    back = slot.position - int(there[1][0, 0])
    assert back < 0, "it moved up"
    held = relocate_kv(
        said.copy.kv, former_of(window).backbone.layout, (back,) * former_of(window).backbone.axes
    )
    assert worst(kv_slice(live(window, 3), 0, said.facts.length), held) <= 1e-5


def test_a_plan_that_takes_over_runs_from_json():
    window, _ = opened("qwen2_5_vl")
    new = whole(window)
    plan = window.plan(Arrange([new, window[3]], on_leave="keep"))
    assert list(plan.heads.values()) == [len(FIRST) + len(SECOND)]
    again = Plan.from_json(plan.to_json())
    branch = window.fork()
    assert branch.run(again, chunks=[new]).tokens_recomputed == len(MORE)
    assert window.run(plan).tokens_recomputed == len(MORE)


@pytest.mark.parametrize(
    ("policy", "on_leave"),
    [
        (ReusePolicy.exact(), "keep"),
        (LAX.without({"survivor"}), "keep"),
        (LAX, "repair"),
        (LAX, "exact"),
    ],
    ids=["exact", "withheld", "repair", "forget"],
)
def test_nothing_is_taken_over_where_survivors_are_not_served(policy, on_leave):
    window, _ = opened("llama_mqa", policy)
    plan = window.plan(Arrange([whole(window), window[3]], on_leave=on_leave))
    assert sum(plan.heads.values()) <= len(FIRST), "what is exact in its place, at most"


def test_other_tokens_and_tokens_from_elsewhere_are_not_taken():
    window, _ = opened("llama_mqa")
    backbone = former_of(window).backbone
    other = text(backbone, MORE, FIRST, SECOND)
    assert window.plan(Arrange([other, window[3]], on_leave="keep")).heads == {}
    plan = window.plan(Arrange([window[0], window[1], text(backbone, SECOND, MORE)], on_leave="keep"))
    assert list(plan.heads.values()) == [len(SECOND)], "in its place"
    for more, tokens in ((1, [len(SECOND)]), (5, [])):
        before_it = [text(backbone, SECOND, *[MORE] * more), window[0], window[1]]
        plan = window.plan(Arrange(before_it, on_leave="keep"))
        assert list(plan.heads.values()) == tokens, "from elsewhere if that is half of it"
    twice = [text(backbone, FIRST, MORE), text(backbone, FIRST, SECOND), window[3]]
    plan = window.plan(Arrange(twice, on_leave="keep"))
    assert sum(plan.heads.values()) == len(FIRST), "no token twice"


def test_a_text_that_begins_alike_does_not_hide_the_answer_behind_it():
    """The step that leaves has an answer, too, in the form of the next one."""
    backbone, (a, *_) = rig("llama_mqa")
    window = make(backbone, None, text(backbone, FIRST), a, policy=LAX)
    respond(window, QUESTION, Arrange(window.slots), **OPTIONS)
    said = window._state.said.facts.encoded.input_ids
    window = make(backbone, None, text(backbone, FIRST), text(backbone, said[:5], MORE), a, policy=LAX)
    respond(window, QUESTION, Arrange(window.slots), **OPTIONS)
    spoken = window._state.said.facts.encoded.input_ids
    new = text(backbone, spoken, MORE)
    for stays in ([], [window[2]]):  # behind the new text: nothing, or what was in front of the answer
        plan = window.plan(Arrange([window[0], new, *stays], on_leave="keep"))
        assert list(plan.heads.values()) == [len(spoken)]


def test_what_is_taken_over_is_never_stored_as_a_patch():
    store = ChunkStore.open("memory://")
    backbone, (a, b, *_) = rig("llama_mqa")
    policy = ReusePolicy(minimum="near", rank=FULL_RANK, forms="always")
    window = make(backbone, store, a, text(backbone, FIRST), b, text(backbone, SECOND), policy=policy)
    new = text(backbone, FIRST, SECOND, MORE)
    window.run(Arrange([window[0], new], on_leave="keep"))
    assert window.slots[1].guarantee == "survivor"
    window.evict(1)
    window.flush()
    kept = {(info.kind, info.chunk_id) for info in store.ls()}
    assert ("canonical", new.id) in kept and ("exact", new.id) not in kept
