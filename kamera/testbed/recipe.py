"""What the backbone is trained on: batches, and the loss with its dense terms.

The loss is cross-entropy on answers plus terms read at the picture tokens and at the questions'
last tokens. In many batches the questions cannot see the legends (they were evicted), so the second
hop has to be written into the items frame's KV; in some the items frame cannot see them either
(blind reuse), and the truth is the default.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

from .batches import Batch, additive, cell_labels, embed, hide_from_questions, isolate, pack
from .frontend import SYSTEM_PROMPTS
from .scoring import some_questions
from .world import COLOURS, GLYPHS, TAGS, TRAINING_SEEDS, Frame, Question, World, resolve

MATCH_LAYER, BIND_LAYER, LOOKUP_LAYER = 1, 3, 4
"""Layers with dense terms: what is looked up (tag, glyph) after layer 1, the bound value after
layer 3, and the attention of layer 4 on the cells that a question is about."""
TOKENS_PER_STEP = 5400


def draw_layout(rng: np.random.Generator) -> str:
    """A window of 1 to 6 frames with at least one items frame."""
    before = rng.choice(5, p=[0.05, 0.25, 0.3, 0.3, 0.1])
    frames = ["L"] * int(before)
    if rng.random() < 0.15:
        frames.insert(int(rng.integers(len(frames) + 1)), "P")
    frames.append("I")
    if rng.random() < 0.2:
        frames.append("L")
    elif rng.random() < 0.2:
        frames.insert(int(rng.integers(len(frames) + 1)), "I")
    return "".join(frames[:6] if "I" in frames[:6] else [*frames[:5], "I"])


def default_answer(question: Question, frames: list[Frame]) -> Question:
    """The question as an items frame that saw no legend answers it."""
    alone = [frame for frame in frames if frame.kind == "items"]
    found = resolve(alone, question.kind, question.subject)
    assert found is not None
    return Question(question.text, found[0], question.kind, question.subject, question.frames)


class Recipe:
    """Draws batches and computes the loss. Modes: `plain`, `evicted`, `blind`."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.world = World(TRAINING_SEEDS + seed)
        self.rng = np.random.default_rng([TRAINING_SEEDS, seed])
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0
        words = {
            "colour": COLOURS,
            "glyph": GLYPHS,
            "tag": [f" {tag}" for tag in TAGS],
        }
        self.vocabulary = {
            name: torch.tensor([tokenizer(word).input_ids for word in entries]).flatten()
            for name, entries in words.items()
        }
        self.vocabulary["subject"] = torch.cat([self.vocabulary["tag"], self.vocabulary["glyph"]])
        self.outputs: dict[int, torch.Tensor] = {}
        for index in (MATCH_LAYER, BIND_LAYER):
            layer = model.model.language_model.layers[index]
            layer.register_forward_hook(partial(self._keep, index))

    def _keep(self, index: int, module: object, args: object, output: torch.Tensor) -> None:
        self.outputs[index] = output

    def draw(self, questions: int = 24) -> tuple[Batch, torch.Tensor, str]:
        """A batch, its mask `[1, 1, s, s]` and its mode."""
        mode = str(self.rng.choice(["plain", "evicted", "blind"], p=[0.4, 0.45, 0.15]))
        layout = draw_layout(self.rng)
        tokens = 14 + 43 * (len(layout) - layout.count("I")) + 148 * layout.count("I")
        size = max(4, round(TOKENS_PER_STEP / (tokens + 11 * questions)))
        episodes = [self.world.episode(self.drawn + i, layout=layout) for i in range(size)]
        self.drawn += size
        kinds = ("value", "glyph", "colour")
        shares = (0.45, 0.2, 0.35) if mode == "plain" else (0.7, 0.3, 0.0)
        asked = [some_questions(e, questions, self.rng, kinds, shares) for e in episodes]
        if mode == "blind":
            asked = [
                [default_answer(one, list(e.frames)) for one in row]
                for e, row in zip(episodes, asked, strict=True)
            ]
        system = SYSTEM_PROMPTS[self.rng.integers(len(SYSTEM_PROMPTS))]
        batch = pack(self.model, self.tokenizer, episodes, asked, system)
        mask = batch.mask
        if mode == "evicted":
            gone = [i for i, frame in enumerate(batch.frames) if frame.kind != "items"]
            if self.rng.random() < 0.25:
                gone = [i for i in gone if self.rng.random() < 0.5]
            mask = hide_from_questions(batch, gone)
        elif mode == "blind":
            items = [i for i, frame in enumerate(batch.frames) if frame.kind == "items"]
            mask = isolate(batch, items)
            if self.rng.random() < 0.5:
                legends = [i for i, frame in enumerate(batch.frames) if frame.kind == "legend"]
                mask = mask & hide_from_questions(batch, legends)
        return batch, mask, mode

    def _dense(self, hidden: torch.Tensor, name: str, labels: torch.Tensor) -> torch.Tensor:
        rows = self.model.lm_head.weight[self.vocabulary[name]]
        return F.cross_entropy((hidden @ rows.T).flatten(0, 1), labels.flatten())

    def _lookup(self, batch: Batch, mask: torch.Tensor, subjects: torch.Tensor) -> torch.Tensor:
        """How far one head is from reading the cells that a question is about.

        `subjects` `[b, q]`: tags, then glyphs. The head's query comes from the token whose next
        token is the answer; the loss is minus the log of the attention on the right cells.
        """
        text, keyed = self.model.model.language_model, torch.full_like(batch.input_ids, -100)
        frame_of = torch.full(keyed.shape[1:], -1)
        for index, (first, last) in enumerate(batch.image_spans):
            labels, frame_of[first:last] = cell_labels(batch, index), index
            legend = batch.frames[index].kind == "legend"
            keyed[:, first:last] = labels.glyphs + len(TAGS) if legend else labels.tags
        source = torch.tensor([[q.frames[-1] for q in row] for row in batch.questions])
        right = (keyed[:, None] == subjects[..., None]) & (frame_of == source[..., None])

        layer = text.layers[LOOKUP_LAYER]
        hidden = layer.input_layernorm(self.outputs[LOOKUP_LAYER - 1])
        width = layer.self_attn.head_dim
        query = F.linear(hidden, *(p[:width] for p in layer.self_attn.q_proj.parameters()))
        key = F.linear(hidden, *(p[:width] for p in layer.self_attn.k_proj.parameters()))
        cos, sin = text.rotary_emb(hidden, batch.positions)
        query, key = apply_rotary_pos_emb(query[:, None], key[:, None], cos, sin)
        scores = query[:, 0, batch.read] @ key[:, 0].transpose(1, 2) * width**-0.5
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask[0, :, batch.read], least)
        log_shares = scores.log_softmax(-1).masked_fill(~right, least)
        return -log_shares.logsumexp(-1).mean()

    def loss(self, batch: Batch, mask: torch.Tensor, mode: str) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss and its parts."""
        text = self.model.model.language_model
        hidden = text(
            inputs_embeds=embed(self.model, batch, self.generator),
            position_ids=batch.positions.expand(-1, len(batch.episodes), -1),
            attention_mask=additive(mask),
            use_cache=False,
        ).last_hidden_state
        match, bind = (text.norm(self.outputs[at]) for at in (MATCH_LAYER, BIND_LAYER))
        logits = self.model.lm_head(hidden[:, batch.read])
        answer = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten(), label_smoothing=0.02)
        stop = self.model.lm_head(hidden[:, batch.read + 1]).flatten(0, 1)
        end = torch.full((len(stop),), self.tokenizer.eos_token_id)
        loss = answer + 0.1 * F.cross_entropy(stop, end)
        subjects = torch.tensor(
            [[q.subject + len(TAGS) * (q.kind == "colour") for q in row] for row in batch.questions]
        )
        loss = loss + 0.5 * self._dense(match[:, batch.read], "subject", subjects)
        lookup = self._lookup(batch, mask, subjects)
        loss = loss + 0.5 * lookup
        values = []
        for index, (first, last) in enumerate(batch.image_spans):
            kind = batch.frames[index].kind
            if kind == "picture":
                continue
            labels = cell_labels(batch, index, isolated=mode == "blind")
            here = hidden[:, first:last]
            if kind == "items":
                values.append(self._dense(here, "colour", labels.colours))
                loss = loss + values[-1] + 0.5 * self._dense(here, "tag", labels.tags)
                loss = loss + 0.5 * self._dense(here, "glyph", labels.glyphs)
                loss = loss + 0.5 * self._dense(bind[:, first:last], "colour", labels.colours)
                loss = loss + 0.5 * self._dense(match[:, first:last], "tag", labels.tags)
            else:
                loss = loss + 0.2 * self._dense(match[:, first:last], "glyph", labels.glyphs)
                loss = loss + 0.2 * self._dense(here, "colour", labels.colours)
                loss = loss + 0.2 * self._dense(here, "glyph", labels.glyphs)
        parts = {"answer": answer, "value": torch.stack(values).mean(), "lookup": lookup}
        return loss, {name: float(part.detach()) for name, part in parts.items()}
