"""The single prompt: a frame that others were bound to is replaced by a stub, and questions follow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kamera import ChatSession, ChunkStore
from kamera.edits import Directive, edit_messages
from kamera.engines.hf import HfEngine
from lab.leyline.judged import Judge
from lab.leyline.prompts import (
    STUBS,
    Desk,
    Item,
    Stub,
    asked,
    conversation,
    items,
    span_of,
    stub_text,
)

ARMS = ("amortize", "repair", "repair, stored", "forget")
PER_EDIT = 8
"""Most questions behind one edit."""
OTHERS = ("re-prefill", "re-prefill behind a prefix cache")
_MODE: dict[str, Any] = {"repair, stored": "repair"}

Judges = dict[str, Judge]
Costs = dict[str, dict[str, int]]


def single(backbone: HfEngine, name: str, n: int, seed: int, *, before: bool) -> dict[str, Any]:
    """At least ``n`` questions, the stub kinds in turn.

    ``before``: the question is in the prompt that is edited (so amortize turns it with the rest), else it
    comes after the edit. Costs are of the edited prompt up to its first logits. "repair, stored" is the same
    edit a second time, in another session on the store of one that was asked nothing: a question is text too,
    and its own stored patch would answer for the items.
    """
    desk = Desk(backbone)
    judges: dict[str, Judges] = {stub: {arm: Judge() for arm in ARMS} for stub in STUBS}
    costs: Costs = {arm: defaultdict(int) for arm in (*ARMS, *OTHERS)}
    edits = done = 0
    for item in items(name, seed, PER_EDIT):
        if done >= n:
            break
        stub = STUBS[edits % len(STUBS)]
        edits += 1
        done += len(item.questions)
        for number, questions in enumerate([[q] for q in item.questions] if before else [item.questions]):
            spent = costs if number == 0 else {arm: defaultdict(int) for arm in costs}
            _edit(desk, item, stub, edits, questions, before, judges[stub], spent)
    return {
        "edits": edits,
        "arms": {arm: Judge.joined(found[arm] for found in judges.values()).summary() for arm in ARMS},
        "cost of an edit": {
            arm: {what: round(count / edits, 2) for what, count in cost.items()}
            for arm, cost in costs.items()
        },
        "by stub": {
            stub: {arm: judge.summary() for arm, judge in found.items()} for stub, found in judges.items()
        },
    }


def _edit(
    desk: Desk,
    item: Item,
    stub: Stub,
    number: int,
    questions: Sequence[str],
    before: bool,
    judges: Judges,
    costs: Costs,
) -> None:
    """One edit under every arm, and the questions behind it."""
    whole = conversation(item.frames, questions[0] if before else "")
    rendered = desk.conversations.render(whole)
    start, stop = span_of(rendered, item.gone)
    tokens = sum(s.num_tokens for s in rendered.segments[start:stop])
    text = stub_text(stub, tokens, desk.conversations.tokenize, number)
    edited = edit_messages(desk.conversations, whole, [Directive(start, stop, text, unit="segments")])
    held: dict[str, ChatSession] = {}
    for arm in ARMS:
        store = ChunkStore.open("memory://")
        if arm == "repair, stored":
            desk.formed(store, whole, edited)
        held[arm] = desk.session(_MODE.get(arm, arm), store)
        held[arm].next_token_logits(whole)
        with desk.backbone.measure() as work:
            held[arm].next_token_logits(edited)
        _count(costs[arm], work.forwards, work.tokens, work.vision_encodes)
    after = desk.conversations.render(edited)
    pictures = [s.start for s in after.segments if s.media is not None]
    kept = rendered.segments[start].start
    _count(costs["re-prefill"], 1, len(after.ids), len(pictures))
    _count(
        costs["re-prefill behind a prefix cache"], 1, len(after.ids) - kept, sum(p >= kept for p in pictures)
    )
    for question in questions:
        full = desk.plain(conversation(item.frames, question))
        prompt = edited if before else asked(edited, question)
        new = desk.plain(prompt)
        for arm in ARMS:
            judges[arm].see(held[arm].fork().next_token_logits(prompt), full, new)


def _count(cost: dict[str, int], forwards: int, tokens: int, encodes: int) -> None:
    for what, count in (("forwards", forwards), ("tokens", tokens), ("vision encodes", encodes)):
        cost[what] += count
