"""What forks of a window cost in memory: bytes of distinct storages, and what the system gives."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType

import torch
from torch import nn

from kamera import ChunkStore
from kamera.engines.hf import HfEngine
from lab.speed.moves import Deck
from lab.speed.table import Row

FORKS = 64
DIVERGED = 4

_FOREIGN = (nn.Module, HfEngine, ChunkStore, ModuleType, type)
# not a window's own: what it serves from, and what everything refers to


def forks(deck: Deck, count: int = FORKS, diverged: int = DIVERGED) -> list[Row]:
    """``count`` forks of the deck's window, and what is added when ``diverged`` of them recall a chunk."""
    deck.ready(deck.chunks)
    deck.ask()
    window = deck.window
    own = storage_bytes([window])
    alone, resident = own, _resident()
    branches = [window.fork() for _ in range(count)]
    shared, grown = storage_bytes([window, *branches]), _resident()
    rows: list[Row] = [_row(f"{count} forks", shared - alone, grown - resident, own, count)]
    for branch in branches[:diverged]:
        spare = deck.spare()
        if branch.recall(spare.id).forwards:
            raise AssertionError("a fork ran a forward to recall a stored chunk")
        branch.next_token_logits(deck.question)
    apart, last = storage_bytes([window, *branches]), _resident()
    rows.append(_row(f"{diverged} of them recall a chunk", apart - shared, last - grown, own, diverged))
    return rows


def storage_bytes(windows: Iterable[object]) -> int:
    """Bytes of all distinct tensor storages reachable from ``windows``, each counted once.

    What they serve from (backbone, store) is not theirs and is left out.
    """
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = list(windows)
    while waiting:
        held = waiting.pop()
        if id(held) in seen or isinstance(held, _FOREIGN):
            continue
        seen.add(id(held))
        if isinstance(held, torch.Tensor):
            storage = held.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(held, FunctionType):
            waiting.extend(cell.cell_contents for cell in held.__closure__ or ())
        else:
            waiting.extend(gc.get_referents(held))
    return sum(storages.values())


def _row(name: str, added: int, resident: int, own: int, count: int) -> Row:
    return {
        "": name,
        "window MB": own / 1e6,
        "added MB": added / 1e6,
        "added % of the window": 100.0 * added / own,
        "each % of the window": 100.0 * added / own / count,
        "resident added MB": resident / 1e6,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
