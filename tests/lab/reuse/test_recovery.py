"""Recovery counts what brute force counts, on traces whose moves are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kamera.reuse import RULES, ContentIndex, Hit, Media, Prompt
from lab.agent_traces import PATTERNS, trace
from lab.reuse.otel import read_calls
from lab.reuse.recovery import Observer, Recovery, covered, recovery
from lab.reuse.render import render
from lab.reuse.words import word_ids


def text(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_000, count)


def observed(rule: str, *prompts: Prompt, sink: int = 32) -> Recovery:
    return recovery(ContentIndex(RULES[rule]), prompts, sink=sink)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    path.write_text(json.dumps(trace(seed=3, requests=8)))
    found: dict[str, list[Prompt]] = {}
    for call in read_calls(path).calls:
        found.setdefault(call.service, []).append(render(call, word_ids, media_tokens=64))
    return found


def test_a_known_move_is_counted_to_the_token():
    body, head = text(1, 1_000), text(2, 100)
    first = Prompt.of(np.concatenate([head, body]), anchors=[100])
    second = Prompt.of(np.concatenate([head[:80], text(3, 50), body, text(4, 40)]), anchors=[130, 1_130])
    assert observed("anchors", first, second) == Recovery(2, 1_100 + 1_170, 80, 1_000)
    assert observed("anchors", first, second).novel == 1_100 + 50 + 40


def test_the_sink_is_never_recovered_but_as_prefix():
    body = text(1, 400)
    moved = Prompt.of(body[200:])
    seen = Prompt.of(body, anchors=[200])
    assert observed("anchors", seen, moved, sink=0).recovered == 200
    first = observed("anchors", seen, moved)
    assert 0 < first.recovered < 200 - 31
    assert observed("anchors", seen, seen).prefix == 400
    with pytest.raises(ValueError, match="-1"):
        Observer(ContentIndex(RULES["low"]), sink=-1)


def test_overlapping_hits_count_once():
    hits = [Hit(10, 20, 0), Hit(15, 30, 1), Hit(40, 50, 2), Hit(42, 45, 3)]
    assert covered(hits, 0) == 30
    assert covered(hits, 17) == 23
    assert covered(hits, 60) == 0
    assert covered([], 5) == 0


def test_another_picture_at_the_same_place_is_novel():
    def screen(digest: str) -> Prompt:
        ids = np.concatenate([text(1, 100), np.full(500, 7), text(2, 100)])
        return Prompt.of(ids, media=[Media(100, 600, digest)], anchors=[100, 600], placeholders={7})

    assert observed("anchors", screen("red"), screen("red")).prefix == 700
    assert observed("anchors", screen("red"), screen("blue")) == Recovery(2, 1_400, 100, 100)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_counts_add_up_and_stay_below_what_moved(prompts, pattern, rule):
    counted = observed(rule, *prompts[pattern])
    assert counted.tokens == sum(map(len, prompts[pattern]))
    assert min(counted.prefix, counted.recovered, counted.novel) >= 0
    seen: set[bytes] = set()  # what any rule may find: windows of 16 tokens of an earlier request
    known = 0
    for prompt in prompts[pattern]:
        windows = [prompt.slice(i, i + 16) for i in range(len(prompt) - 15)]
        inside = np.zeros(len(prompt), bool)
        for i, window in enumerate(windows):
            if window in seen:
                inside[i : i + 16] = True
        known += int(inside.sum())
        seen.update(windows)
    short = len(prompts[pattern]) * 40 * 15  # segments shorter than such a window, at messages' ends
    assert counted.prefix + counted.recovered <= known + short


@pytest.mark.parametrize("pattern", ["rag", "tools", "rerank"])
def test_what_moves_is_recovered_without_a_reset_too(prompts, pattern):
    without, with_anchors = (observed(rule, *prompts[pattern]) for rule in ("low", "anchors"))
    assert without.recovered > 0.9 * with_anchors.recovered


def test_traces_of_one_seed_are_one_trace():
    kinds = ("rag", "screens")
    assert trace(5, 2, kinds) == trace(5, 2, kinds)
    assert trace(5, 2, kinds) != trace(6, 2, kinds)
    only = trace(5, 2, ("rag",))["resourceSpans"]
    assert only == trace(5, 2, kinds)["resourceSpans"][:1]
