"""Records that a store is owed: made, and put together with others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kamera.patches.chunks import Facts
from kamera.patches.losses import Losses
from kamera.store import CanonicalRecord, ChunkStore, Context, EncodingRecord, PatchRecord


class Waiting(NamedTuple):
    """What later work will store in a store, by context and id: until then each former takes it from here."""

    chunks: dict[tuple[Context, str], Facts]
    anchors: dict[tuple[Context, str], Any]  # `Anchor`, which knows this file


_waiting: weakref.WeakKeyDictionary[ChunkStore, Waiting] = weakref.WeakKeyDictionary()


def waiting_records(store: ChunkStore) -> Waiting:
    """What waits for a store."""
    return _waiting.setdefault(store, Waiting({}, {}))


@dataclass(frozen=True)
class Owed:
    """Records of one chunk or anchor to be put, the main one last.

    ``losses`` say ``what`` was lost if that fails. ``later``: no call hears of an error that they do not
    bear, so the next report does.
    """

    store: ChunkStore
    records: Sequence[CanonicalRecord | EncodingRecord | PatchRecord]
    losses: Losses
    what: str
    later: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.nbytes for record in self.records)

    def end(self, error: Exception | None) -> None:
        """Note what became of the records. Raises an error that the losses do not bear."""
        unkept, main = self.losses.unkept, self.records[-1]
        if main.kind == "canonical":
            (unkept.discard if error is None else unkept.add)(main.chunk_id)
        try:
            with self.losses.absorb_errors(self.what):
                if error is not None:
                    raise error
        except Exception as unborne:
            if self.later:
                self.losses.note_for_next(f"{self.what}: {type(unborne).__name__}: {unborne}")
            raise
        finally:
            self._stop_waiting()

    def drop(self, why: str) -> None:
        """Leave a note that the records will not be put, and why."""
        self._stop_waiting()
        self.losses.note_for_next(f"{self.what}: {why}")

    def _stop_waiting(self) -> None:
        main, waiting = self.records[-1], waiting_records(self.store)
        if not isinstance(main, PatchRecord):
            there = waiting.anchors if main.kind == "anchor" else waiting.chunks
            there.pop((main.context, main.chunk_id), None)


def put_owed(owed: Sequence[Owed]) -> None:
    """Put the records, those of one store together.

    Each is brought to its `end`; then the first error that one of them raised is raised.
    """
    failed: list[Exception] = []
    for store in {id(one.store): one.store for one in owed}.values():
        mine = [one for one in owed if one.store is store]
        records = [record for one in mine for record in one.records]
        try:
            errors = [put.error for put in store.put_many(records)]
        except Exception as error:  # whoever waits for it must be told
            errors = [error] * len(records)
        for one in mine:
            own, errors = errors[: len(one.records)], errors[len(one.records) :]
            try:
                one.end(next((error for error in own if error is not None), None))
            except Exception as error:
                failed.append(error)
    if failed:
        raise failed[0]
