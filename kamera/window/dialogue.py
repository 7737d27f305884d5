"""A window over an engine whose chunks are the segments of a rendered conversation: what a session needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from PIL import Image

from kamera.content import Chunk
from kamera.engines import Completes, Engine, EnginePrompt, EngineSampling, PromptPicture, Recipe
from kamera.errors import UnsupportedByEngine, WindowFull
from kamera.patches import Catalogue, Losses, later_of
from kamera.store import ChunkStore
from kamera.trust import Guarantee, ReusePolicy, weakest
from kamera.window.engine_window import EngineSlot, EngineWindow, HeldChunk
from kamera.window.seats import Seat


@dataclass(frozen=True, eq=False)
class Dialogue:
    """A prompt as an engine takes it: the ``question``'s ids behind a window's chunks, and all ``messages``.

    Pictures stand in messages as ``{"type": "image"}``, in the order of the window's chunks that show them.
    """

    question: torch.Tensor
    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Any] = ()


class DialogueWindow(EngineWindow):
    """An `EngineWindow` of a session; ``anchor`` are the ids ``[tokens]`` that every prompt begins with.

    A fork is independent of it; one thread uses each. The chunks come in the order that a session gives.
    """

    def __init__(
        self,
        engine: Completes,
        backbone: Engine,
        store: ChunkStore,
        anchor: torch.Tensor,
        *,
        policy: ReusePolicy | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(
            engine,
            backbone,
            store,
            fingerprint=backbone.fingerprint,
            system=anchor,
            policy=policy,
            max_tokens=max_tokens,
        )
        self.backbone = backbone
        self._prefilled: set[str] = set()  # shared by all forks: a canonical is asked for once
        self._head = Dialogue(torch.empty(0, dtype=torch.int64), ())  # the system prompt of the last one

    def fork(self, *, apart: bool = False) -> DialogueWindow:
        """A window of the same chunks; all forks are ``apart``."""
        branch = copy.copy(self)
        branch._held, branch._outlines = dict(self._held), dict(self._outlines)
        branch._rows = Catalogue(self._store, self._context, None, Losses())
        return branch

    @property
    def guarantee(self) -> Guarantee:
        """The weakest guarantee of a slot; "exact" without one."""
        return weakest([slot.guarantee for slot in self.slots])

    def arrange(
        self, chunks: Sequence[EngineSlot | Chunk], shown: Mapping[str, Image.Image], policy: ReusePolicy
    ) -> tuple[EngineSlot, ...]:
        """Make the window hold these slots of its own and these new chunks, in this order, under ``policy``.

        ``shown`` are the pictures of new chunks, by chunk id. Raises WindowFull.
        """
        seats = {slot.start: seat for slot, seat in zip(self.slots, self._seats, strict=True)}
        wanted: list[Seat | str] = []
        for chunk in chunks:
            if isinstance(chunk, EngineSlot):
                wanted.append(seats[chunk.start])
                continue
            images = (shown[chunk.id],) if chunk.id in shown else ()
            self._held[chunk.id] = HeldChunk(chunk.id, tuple(chunk.input_ids.tolist()), (), images)
            wanted.append(chunk.id)
        lengths = [len(self._held[w if isinstance(w, str) else w.chunk_id].ids) for w in wanted]
        if self._over((), sum(lengths)):
            raise WindowFull(
                f"the conversation has {sum(lengths)} tokens behind its system prompt: raise max_tokens"
            )
        self.policy = policy
        self._arrange(wanted)
        named = {seat.chunk_id for seat in self._seats}
        self._held = {name: held for name, held in self._held.items() if name in named}
        return self.slots

    def prompt(self, dialogue: Dialogue, tokens: int, sampling: EngineSampling) -> EnginePrompt:
        """The prompt of a dialogue, for an answer of ``tokens`` tokens."""
        system = tuple(m for m in dialogue.messages if m["role"] in ("system", "developer"))
        self._head = replace(dialogue, messages=system)
        pictures = [PromptPicture(s.chunk_id, i) for s in self._seats for i in self._held[s.chunk_id].images]
        shown, ids = self.recipe(), tuple(dialogue.question.tolist())
        made = EnginePrompt((*shown.ids, *ids), dialogue.messages, tuple(pictures), shown, tokens)
        return replace(made, tools=dialogue.tools, sampling=sampling)

    def _unstored(self) -> list[str]:
        """As in `EngineWindow`, without the chunks that the engine has prefilled alone before."""
        return [chunk_id for chunk_id in super()._unstored() if chunk_id not in self._prefilled]

    def _run_later(self, seats: Sequence[Seat]) -> None:
        super()._run_later(seats)
        self._prefilled.update(seat.chunk_id for seat in seats)

    def _later_prompt(self, shown: Recipe, chunks: Sequence[HeldChunk]) -> EnginePrompt:
        """A chunk behind the system prompt: a picture as a message, a text, which may be none, as tokens."""
        pictures = tuple(PromptPicture(held.chunk_id, image) for held in chunks for image in held.images)
        alone = (*self._head.messages, {"role": "user", "content": [{"type": "image"} for _ in pictures]})
        made = EnginePrompt(shown.ids, alone if pictures else (), pictures, shown, 1, later=True)
        return replace(made, tools=self._head.tools)

    def condition(self, slot: EngineSlot, on: bool) -> NoReturn:
        """Refused, as all that takes a model and a live cache."""
        raise UnsupportedByEngine(
            "a clean view of a chunk: its KV is the engine's; use a session without one"
        )

    def next_token_logits(self, question: torch.Tensor) -> NoReturn:
        """Refused."""
        raise UnsupportedByEngine("logits: the engine gives none; use a session without one")

    def flush(self) -> None:
        """Wait for all later work of this window's backbone."""
        later_of(self.backbone).flush()
