"""A window over an engine whose chunks are the segments of a rendered conversation: what a session needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from kamera.content import Chunk
from kamera.engines import Account, Completes, Engine, EnginePrompt, EngineSampling
from kamera.patches import Catalogue, Losses
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window.engine_prompts import Dialogue, PromptChunk
from kamera.window.engine_window import EngineSlot, EngineWindow
from kamera.window.seating import check_room
from kamera.window.seats import Seat, Seats


class DialogueWindow(EngineWindow):
    """An `EngineWindow` of a session.

    ``anchor`` are the ids ``[tokens]`` that every prompt begins with; ``options`` as for `EngineWindow`.
    A fork is independent of it; one thread uses each. The chunks come in the order that a session gives.
    """

    def __init__(
        self, engine: Completes, backbone: Engine, store: ChunkStore, anchor: torch.Tensor, **options: Any
    ) -> None:
        super().__init__(engine, backbone, store, fingerprint=backbone.fingerprint, system=anchor, **options)
        self._prefilled: set[str] = set()  # shared by all forks: a canonical is asked for once

    def fork(self, *, apart: bool = False) -> DialogueWindow:
        """A window of the same chunks; all forks are ``apart``."""
        branch = copy.copy(self)
        branch._account = Account()
        places = self._places
        branch._places = replace(places, chunks=dict(places.chunks), outlines=dict(places.outlines))
        branch._rows = Catalogue(self._store, self._context, None, Losses())
        return branch

    def arrange(
        self, chunks: Sequence[EngineSlot | Chunk], shown: Mapping[str, Image.Image], policy: ReusePolicy
    ) -> tuple[EngineSlot, ...]:
        """Make the window hold these slots of its own and these new chunks, in this order, under ``policy``.

        ``shown`` are the pictures of new chunks, by chunk id. Raises WindowFull.
        """
        seats = {slot.start: seat for slot, seat in zip(self.slots, self._seats.seats, strict=True)}
        wanted, named = list[Seat | str](), self._places.chunks
        for chunk in chunks:
            if isinstance(chunk, EngineSlot):
                wanted.append(seats[chunk.start])
                continue
            images = (shown[chunk.id],) if chunk.id in shown else ()
            parts = tuple({"type": "image"} for _ in images)
            named[chunk.id] = PromptChunk(chunk.id, tuple(chunk.input_ids.tolist()), parts, images)
            wanted.append(chunk.id)
        check_room(self._limits, [named[w].newcomer if isinstance(w, str) else w for w in wanted])
        self.policy = policy
        self._arrange(wanted)
        self._places.chunks = {name: named[name] for name in self._seats.chunk_ids}
        return self.slots

    def prompt(self, dialogue: Dialogue, tokens: int, sampling: EngineSampling) -> EnginePrompt:
        """The prompt of a dialogue, for an answer of ``tokens`` tokens."""
        system = tuple(m for m in dialogue.messages if m["role"] in ("system", "developer"))
        self._head = replace(dialogue, messages=system)
        return replace(self._prompt(self._seats, dialogue, tokens), sampling=sampling)

    def _unstored_ids(self) -> list[str]:
        """As in `EngineWindow`, without the chunks that the engine has prefilled alone before."""
        return [chunk_id for chunk_id in super()._unstored_ids() if chunk_id not in self._prefilled]

    def _run_later(self, seats: Seats) -> None:
        super()._run_later(seats)
        self._prefilled.update(seats.chunk_ids)
