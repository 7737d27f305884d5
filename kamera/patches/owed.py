"""Records that a store is owed: made, and put together with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kamera.store import CanonicalRecord, ChunkStore, EncodingRecord, PatchRecord

Told = Callable[[Exception | None], None]


def raised(error: Exception | None) -> None:
    """Raise the error, if there is one."""
    if error is not None:
        raise error


@dataclass(frozen=True)
class Owed:
    """Records to be put; ``told`` is called with the first error among them, or None, once they are."""

    store: ChunkStore
    records: Sequence[CanonicalRecord | EncodingRecord | PatchRecord]
    told: Told = raised

    def then(self, done: Callable[[], object]) -> Owed:
        """The same, after which ``done`` is called in any case."""

        def told(error: Exception | None) -> None:
            try:
                self.told(error)
            finally:
                done()

        return replace(self, told=told)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.nbytes for record in self.records)


def pay(owed: Sequence[Owed]) -> None:
    """Put the records, those of one store together, and tell each what became of its own.

    Everyone is told; then the first error that one of them raised is raised.
    """
    failed: list[Exception] = []
    for store in {id(one.store): one.store for one in owed}.values():
        mine = [one for one in owed if one.store is store]
        records = [record for one in mine for record in one.records]
        try:
            errors = [put.error for put in store.put_many(records)] if records else []
        except Exception as error:  # whoever waits for it must be told
            errors = [error] * len(records)
        for one in mine:
            own, errors = errors[: len(one.records)], errors[len(one.records) :]
            try:
                one.told(next((error for error in own if error is not None), None))
            except Exception as error:
                failed.append(error)
    if failed:
        raise failed[0]
