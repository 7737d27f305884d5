"""Questions that cross an edit: they join a legend, which the edit removes or moves, with items behind it.

A window of frames of which the last shows items and those before it legends. Every question's answer changes
with the edit, so an arm that serves the items as they were conditioned before it answers wrongly. The
sabotaged arm is the repair with stored patches, each exchanged for one from another window: the same chunk's
behind other legends, or that of a chunk as long.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from kamera import ChunkStore, KameraWindow, Patch, testbed
from kamera.engines.hf import HfEngine
from kamera.testbed.frames import Frame
from kamera.window import former_of
from lab.leyline.judged import Judge
from lab.leyline.prompts import HELD_OUT, LAYOUTS, Desk, Messages, asked, conversation, of_one_size

Edit = Literal["removed", "moved"]
EDITS: tuple[Edit, ...] = get_args(Edit)
ARMS = ("exact", "repair", "repair, stored", "amortize", "sabotage: another's patches")
STORED = ("repair, stored", "sabotage: another's patches")
"""Those that find the patches of an earlier session."""
_MODES: dict[str, Any] = {"exact": "forget", "amortize": "amortize"}
_RENAMES = ("LLI", "LRI", "LLRI", "LPLI")
PER_EDIT = 4
"""Most questions behind one edit: of one window they are no independent items."""


@dataclass(frozen=True)
class Hop:
    """Frames before an edit and after it, and questions with their answers after it.

    ``foreign`` are other frames before the same items, as many.
    """

    edit: Edit
    before: tuple[Frame, ...]
    after: tuple[Frame, ...]
    foreign: tuple[Frame, ...]
    questions: tuple[tuple[str, str], ...]


def hops(name: str, seed: int) -> Iterator[Hop]:
    """Without end, the two edits in turn."""
    layouts = LAYOUTS.get(name, _RENAMES)
    world, draw, index = testbed.World(HELD_OUT + 3 + seed), random.Random(seed), 0
    while True:
        edit, layout = EDITS[index % 2], layouts[index // 2 % len(layouts)]
        episode = world.episode(index, layout=layout)
        others = world.episode(index + 1_000_000, layout=layout)
        index += 1
        frames = of_one_size(name, episode.frames)
        speaking = [i for i, f in enumerate(frames) if f.kind in ("legend", "rename")]
        target = draw.choice(speaking)
        order = [i for i in range(len(frames)) if i != target]
        if edit == "moved":  # next to the items, or to the front where it stands there already
            order.insert(len(frames) - 2 if target != len(frames) - 2 else 0, target)
        found = [episode.ask(*subject) for subject in episode.subjects(["value"])]
        changed = [(q.text, episode.answer(q, order), q.answer) for q in found]
        kept = [(text, after) for text, after, old in changed if after is not None and after != old]
        draw.shuffle(kept)
        if kept:
            foreign = (*of_one_size(name, others.frames[:-1]), frames[-1])
            after = tuple(frames[i] for i in order)
            yield Hop(edit, frames, after, foreign, tuple(kept[:PER_EDIT]))


@dataclass
class _Told:
    judge: Judge = field(default_factory=Judge)
    right: list[bool] = field(default_factory=list)


def crossed(backbone: HfEngine, name: str, n: int, seed: int) -> dict[str, Any]:
    """At least ``n`` questions of each edit under every arm, held against runs without a cache.

    A prefix cache and Kronk's caches prefill what stands behind an edit: they answer as no cache does.
    """
    desk = Desk(backbone)
    told: dict[tuple[str, str], _Told] = defaultdict(_Told)
    counts = dict.fromkeys(EDITS, 0)
    for hop in hops(name, seed):
        if min(counts.values()) >= n:
            break
        if counts[hop.edit] >= n:
            continue
        counts[hop.edit] += len(hop.questions)
        _see(desk, hop, told)
    return {edit: {arm: _summary(told[edit, arm]) for arm in ("no cache", *ARMS)} for edit in EDITS}


def _see(desk: Desk, hop: Hop, told: dict[tuple[str, str], _Told]) -> None:
    before, after = conversation(hop.before), conversation(hop.after)
    chats = {}
    for arm in ARMS:
        store = ChunkStore.open("memory://")  # no arm finds what another was asked: a question is text, too
        if arm in STORED:
            desk.formed(store, before, after)
        if arm.startswith("sabotage"):
            _exchanged(desk, store, conversation(hop.foreign))
        chats[arm] = desk.session(_MODES.get(arm, "repair"), store)
        chats[arm].next_token_logits(before)
        chats[arm].next_token_logits(after)
    for question, answer in hop.questions:
        full, new = desk.plain(asked(before, question)), desk.plain(asked(after, question))
        for arm in ("no cache", *ARMS):
            logits = new if arm == "no cache" else chats[arm].fork().next_token_logits(asked(after, question))
            one = told[hop.edit, arm]
            one.judge.see(logits, full, new)
            said = desk.backbone.builder.detokenize(logits.argmax()[None]) or ""
            one.right.append(said.strip() == answer)


def _exchanged(desk: Desk, store: ChunkStore, foreign: Messages) -> int:
    """Give every stored patch the factors of one formed in ``foreign``; how many.

    The same chunk's, where it stands there too (the items do), else those of a chunk of as many tokens.
    """
    other = ChunkStore.open("memory://")
    chat = desk.session("repair", other)
    chat.next_token_logits(foreign)
    assert isinstance(chat.window, KameraWindow)
    context, count = former_of(chat.window).context, 0
    theirs = [other.get_patch(context, info.chunk_id, info.antecedents) for info in other.ls("exact")]
    for info in store.ls("exact"):
        own = store.get_patch(context, info.chunk_id, info.antecedents)
        if own is None:
            continue
        fits = [one for one in theirs if one is not None and _tokens(one.patch) == _tokens(own.patch)]
        fits.sort(key=lambda one: one.chunk_id != own.chunk_id)
        if fits:
            store.put(replace(own, patch=fits[0].patch))
            count += 1
    return count


def _tokens(patch: Patch) -> int:
    """Tokens of the chunk that a patch is for; 0 for one without factors."""
    return max((int(low.left.shape[0]) for layer in patch.layers for low in layer.values()), default=0)


def _summary(one: _Told) -> dict[str, Any]:
    found = one.judge.summary()
    names = ("n", "references disagree", "answers as re-prefill", "answers as full", "KL to re-prefill")
    shares: dict[str, Any] = {name: found[name] for name in names}
    return {"right": round(sum(one.right) / max(len(one.right), 1), 4), **shares}


def rows(found: dict[str, Any]) -> Sequence[Sequence[Any]]:
    """One row per edit and arm: right, as no cache, as before the edit, KL to no cache."""
    names = ("n", "right", "answers as re-prefill", "answers as full", "KL to re-prefill")
    each = ((edit, arm, told) for edit, arms in found.items() for arm, told in arms.items())
    return [(edit, arm, *(told[name] for name in names)) for edit, arm, told in each]
