"""What the shipped backbone is trained on: batches, and the loss with its dense terms.

The loss is cross-entropy on answers plus terms read at the tokens that state facts and at the
questions' last tokens. In many batches the questions cannot see the legends (they were evicted), so
the binding has to be written into the items frame's KV; in some the items frame cannot see them
either (blind reuse), and the truth is the default.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.testbed.batches import Batch, Labels, hide_from_questions, isolate, labels, pack
from benchmarks.testbed.frontend import SYSTEM_PROMPTS
from benchmarks.testbed.scoring import decode, some_questions
from kamera.testbed.frames import COLOURS, GLYPHS, TAGS, Frame
from kamera.testbed.world import TRAINING_SEEDS, Question, World, answer_with_frames

MATCH_LAYER, CARRY_LAYER, BIND_LAYER, LOOKUP_LAYER = 1, 2, 3, 4
"""Layers with dense terms: what a fact is looked up by after layer 1, the value a rename carries
after layer 2, an item's value after layer 3, and the attention of layer 1 on the question's subject,
of layer 2 on the legends a rename takes its value from, of layer 3 on the facts that bind an item, of
layer 4 on what is asked about."""
TOKENS_PER_STEP = 4200
QUESTIONS = 24


def draw_layout(rng: np.random.Generator) -> str:
    """A window of 1 to 6 frames with at least one items frame; text, pictures or both."""
    before = int(rng.choice(5, p=[0.05, 0.2, 0.3, 0.3, 0.15]))
    frames = [str(letter) for letter in rng.choice(["L", "R", "P"], size=before, p=[0.6, 0.33, 0.07])]
    frames.append("B" if rng.random() < 0.15 else "I")
    if rng.random() < 0.15:
        frames.append("LR"[int(rng.integers(2))])
    elif before < 4 and rng.random() < 0.1:
        frames.insert(int(rng.integers(len(frames) + 1)), "I")
    text = rng.random(len(frames)) < rng.choice([0.0, 0.5, 1.0], p=[0.75, 0.1, 0.15])
    twins = {"L": "l", "R": "r", "I": "i", "B": "i", "P": "P"}
    return "".join(twins[one] if as_text else one for one, as_text in zip(frames, text, strict=True))


def default_answer(question: Question, frames: list[Frame]) -> Question:
    """The question as an items frame that saw nothing before it answers it."""
    found = answer_with_frames(
        [frame for frame in frames if frame.shows_items], question.kind, question.subject
    )
    assert found is not None
    return replace(question, answer=found[0])


class Recipe:
    """Draws batches and computes the loss. Modes: `plain`, `evicted`, `blind`."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.world = World(TRAINING_SEEDS + seed)
        self.rng = np.random.default_rng([TRAINING_SEEDS, seed])
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0
        words = {
            "colour": COLOURS,
            "glyph": GLYPHS,
            "target": [f" {glyph}" for glyph in GLYPHS],
            "tag": [f" {tag}" for tag in TAGS],
        }
        self.vocabulary = {
            name: torch.tensor([tokenizer(word).input_ids for word in entries]).flatten()
            for name, entries in words.items()
        }
        self.vocabulary["subject"] = torch.cat([self.vocabulary["tag"], self.vocabulary["glyph"]])
        self.outputs: dict[int, torch.Tensor] = {}
        self.attended: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.text = model.model.language_model
        for index in (MATCH_LAYER, CARRY_LAYER, BIND_LAYER):
            self.text.layers[index].register_forward_hook(partial(self._keep, index))
        AttentionInterface.register("testbed_lookup", self._attend)
        self.text.config._attn_implementation = "testbed_lookup"

    def _keep(self, index: int, module: object, args: object, output: Any) -> None:
        self.outputs[index] = output[0] if isinstance(output, tuple) else output

    def _attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """Attention as ever; the first query head and what it reads are kept where it is taught."""
        if module.layer_idx in (MATCH_LAYER, CARRY_LAYER, BIND_LAYER, LOOKUP_LAYER):
            self.attended[module.layer_idx] = query[:, 0], key[:, 0]
        return sdpa_attention_forward(module, query, key, *rest, **named)

    def draw(self) -> tuple[Batch, torch.Tensor, str]:
        """A batch, its mask `[1, 1, s, s]` and its mode."""
        mode = str(self.rng.choice(["plain", "evicted", "blind"], p=[0.4, 0.45, 0.15]))
        layout = draw_layout(self.rng)
        lengths = {"I": 148, "B": 260, "i": 123, "l": 51, "r": 51}
        tokens = 14 + sum(lengths.get(letter, 68) for letter in layout)
        size = max(4, round(TOKENS_PER_STEP / (tokens + 11 * QUESTIONS)))
        episodes = [self.world.episode(self.drawn + i, layout=layout) for i in range(size)]
        self.drawn += size
        kinds = ("value", "glyph", "colour")
        shares = (0.5, 0.2, 0.3) if mode == "plain" else (0.75, 0.25, 0.0)
        asked = [some_questions(e, QUESTIONS, self.rng, kinds, shares) for e in episodes]
        if mode == "blind":
            asked = [
                [default_answer(one, list(e.frames)) for one in row]
                for e, row in zip(episodes, asked, strict=True)
            ]
        system = SYSTEM_PROMPTS[self.rng.integers(len(SYSTEM_PROMPTS))]
        batch = pack(self.model, self.tokenizer, episodes, asked, system)
        others = [i for i, frame in enumerate(batch.frames) if not frame.shows_items]
        mask = batch.mask
        if mode == "evicted":
            gone = others
            if self.rng.random() < 0.25:
                gone = [i for i in gone if self.rng.random() < 0.5]
            mask = hide_from_questions(batch, gone)
        elif mode == "blind":
            mask = isolate(batch, [i for i in range(len(batch.frames)) if i not in others])
            if self.rng.random() < 0.5:
                mask = mask & hide_from_questions(batch, others)
        return batch, mask, mode

    def _dense(self, hidden: torch.Tensor, name: str, truth: torch.Tensor) -> torch.Tensor:
        rows = self.model.lm_head.weight[self.vocabulary[name]]
        return F.cross_entropy((hidden @ rows.T).flatten(0, 1), truth.flatten())

    def _reads(self, layer: int, at: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """How far a layer's first head is from reading what it should.

        `at` `[n]` are the tokens that read, `right` `[b, n, s]` what they should read: the loss is
        minus the log of the attention on that, over the tokens that have something to read.
        """
        query, key = self.attended[layer]
        scores = query[:, at] @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        log = scores.masked_fill(~mask[0, 0, at], -torch.inf).log_softmax(-1)
        some = right.any(-1)
        if not some.any():
            return scores.new_zeros(())
        return -log[some].masked_fill(~right[some], -torch.inf).logsumexp(-1).mean()

    def _keys(self, batch: Batch, truths: list[Labels | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token can be looked up by (tags, then glyphs) `[b, s]`, and its frame `[s]`."""
        keys = torch.full_like(batch.input_ids, -100)
        frame_of = torch.full(keys.shape[1:], -1)
        for index, (tokens, truth) in enumerate(zip(batch.facts, truths, strict=True)):
            if truth is not None:
                frame_of[tokens] = index
                shows_items = batch.frames[index].shows_items
                keys[:, tokens] = truth.tag if shows_items else truth.glyph + len(TAGS)
        return keys, frame_of

    def loss(self, batch: Batch, mask: torch.Tensor, mode: str) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss and its parts."""
        hidden = decode(self.model, batch, mask, self.generator)
        match, carry, bind = (
            self.text.norm(self.outputs[at]) for at in (MATCH_LAYER, CARRY_LAYER, BIND_LAYER)
        )
        logits = self.model.lm_head(hidden[:, batch.read])
        answer = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten(), label_smoothing=0.02)
        stop = self.model.lm_head(hidden[:, batch.read + 1]).flatten(0, 1)
        end = torch.full((len(stop),), self.tokenizer.eos_token_id)
        subjects = torch.tensor(
            [[q.subject + len(TAGS) * (q.kind == "colour") for q in row] for row in batch.questions]
        )
        loss = answer + 0.1 * F.cross_entropy(stop, end)
        loss = loss + 0.5 * self._dense(match[:, batch.read], "subject", subjects)
        truths = [
            None if f.kind == "picture" else labels(batch, i, isolated=mode == "blind" and f.shows_items)
            for i, f in enumerate(batch.frames)
        ]
        keys, frame_of = self._keys(batch, truths)
        source = torch.tensor([[q.frames[-1] for q in row] for row in batch.questions])
        right = (keys[:, None] == subjects[..., None]) & (frame_of == source[..., None])
        lookup = self._reads(LOOKUP_LAYER, batch.read, right, mask)
        named = (torch.arange(len(frame_of)) == batch.subject[:, None]).expand(len(keys), -1, -1)
        loss = loss + 0.5 * lookup + 0.3 * self._reads(MATCH_LAYER, batch.read, named, mask)

        def binds(glyph: torch.Tensor, truth: Labels) -> torch.Tensor:
            same = keys[:, None] == (glyph + len(TAGS))[..., None]
            return same & (frame_of == truth.source[..., None])

        values = []
        for frame, tokens, truth in zip(batch.frames, batch.facts, truths, strict=True):
            if truth is None:
                continue
            last, late, early = hidden[:, tokens], bind[:, tokens], match[:, tokens]
            if frame.shows_items:
                values.append(self._dense(last, "colour", truth.colour))
                loss = loss + values[-1] + 0.5 * self._dense(late, "colour", truth.colour)
                loss = loss + 0.5 * self._dense(last, "tag", truth.tag)
                loss = loss + 0.5 * self._dense(last, "glyph", truth.glyph)
                loss = loss + 0.5 * self._dense(early, "tag", truth.tag)
                loss = loss + 0.3 * self._reads(BIND_LAYER, tokens, binds(truth.glyph, truth), mask)
            elif frame.kind == "rename":
                carried = carry[:, tokens]
                loss = loss + 0.5 * self._dense(carried, "colour", truth.colour)
                loss = loss + 0.5 * self._dense(last, "colour", truth.colour)
                loss = loss + 0.2 * self._dense(early, "glyph", truth.glyph)
                # still there after the value came: items look the rename up by it one layer later
                loss = loss + 0.3 * self._dense(carried, "glyph", truth.glyph)
                loss = loss + 0.3 * self._dense(early, "target", truth.target)
                loss = loss + 0.3 * self._reads(CARRY_LAYER, tokens, binds(truth.target, truth), mask)
            else:
                loss = loss + 0.2 * self._dense(early, "glyph", truth.glyph)
                loss = loss + 0.2 * self._dense(last, "colour", truth.colour)
                loss = loss + 0.2 * self._dense(last, "glyph", truth.glyph)
        parts = {"answer": answer, "value": torch.stack(values).mean(), "lookup": lookup}
        return loss, {name: float(part.detach()) for name, part in parts.items()}
