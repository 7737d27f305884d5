"""Bytes that a window holds, by purpose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from kamera.engines import LiveKV
from kamera.ops import kv_tensors
from kamera.patches import Anchor, Copy
from kamera.window.state import WindowState

Storages = dict[tuple[torch.device, int], int]
"""Bytes of memory blocks by device and address; a block counts once, however many tensors share it."""


@dataclass(frozen=True)
class WindowMemory:
    """Bytes a window holds.

    ``live`` is the allocation of its live cache, including the free part behind the last token; ``copies``
    are the KV, patches and positions that every move starts from, the anchor's among them; ``encodings`` the
    inputs from which chunks are prefilled again. ``shared`` is the part of the total that forks hold too:
    each fork counts it, and it is in memory once. The store's own memory is not counted.
    """

    live: int
    copies: int
    encodings: int
    shared: int

    @property
    def total(self) -> int:
        """All bytes: live cache, copies and encodings."""
        return self.live + self.copies + self.encodings

    @property
    def own(self) -> int:
        """Bytes that are freed when this window alone is gone."""
        return self.total - self.shared


@dataclass(frozen=True)
class Holdings:
    """The blocks of memory a window holds, each of them once."""

    live: Storages
    copies: Storages
    encodings: Storages

    @classmethod
    def of(cls, anchor: Anchor, state: WindowState, live: LiveKV) -> Holdings:
        """The blocks of an anchor, a state and a live cache."""
        room = _storages(kv_tensors(live.tensors))
        tensors = [anchor.input_ids, anchor.positions, *kv_tensors(anchor.kv)]
        inputs: list[torch.Tensor] = []
        for resident in (*state.residents, *(() if state.said is None else (state.said,))):
            for copy in (resident.copy, resident.clean):
                tensors.extend(() if copy is None else _parts(copy))
            encoded = resident.facts.encoded
            inputs += [encoded.input_ids, *encoded.position_inputs.values(), *encoded.tensors.values()]
        copies = {k: n for k, n in _storages(tensors).items() if k not in room}
        rest = {k: n for k, n in _storages(inputs).items() if k not in room and k not in copies}
        return cls(room, copies, rest)

    def memory(self, others: Iterable[Holdings]) -> WindowMemory:
        """The sums of bytes; ``others`` are the holdings of its forks."""
        theirs: set[tuple[torch.device, int]] = set()
        for other in others:
            theirs |= other.all.keys()
        shared = sum(n for k, n in self.all.items() if k in theirs)
        live, copies, encodings = (sum(part.values()) for part in (self.live, self.copies, self.encodings))
        return WindowMemory(live, copies, encodings, shared)

    @property
    def all(self) -> Storages:
        """All blocks."""
        return self.live | self.copies | self.encodings


def _storages(tensors: Iterable[torch.Tensor]) -> Storages:
    blocks = ((t.device, t.untyped_storage()) for t in tensors)
    return {(device, block.data_ptr()): block.nbytes() for device, block in blocks if block.nbytes()}


def _parts(copy: Copy) -> Iterator[torch.Tensor]:
    yield copy.positions
    yield from kv_tensors(copy.kv)
    yield from () if copy.patch is None else copy.patch.tensors()
