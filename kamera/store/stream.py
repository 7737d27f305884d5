"""A canonical on its way: its layers in order, while those behind are still being read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kamera.errors import CorruptChunk
from kamera.ops.kv import KV
from kamera.ops.quantize_kv import Loss
from kamera.store import forks
from kamera.store.disk.reading import Reading
from kamera.store.groups import HEAD
from kamera.store.keys import Context
from kamera.store.records import CanonicalRecord, layer_of


@dataclass(frozen=True, eq=False)
class CanonicalHead:
    """What a canonical is, without its KV and embeds: the fields of `CanonicalRecord`, verified.

    ``layers``: the channels of each; ``loss`` is None for a KV as the model computed it.
    """

    chunk_id: str
    context: Context
    input_ids: torch.Tensor
    positions: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    info: Mapping[str, Any]
    layers: Sequence[Sequence[str]]
    loss: Loss | None

    @property
    def tokens(self) -> int:
        """Number of tokens of the chunk."""
        return self.input_ids.shape[0]


class LayerStream:
    """The layers of one canonical, each yielded once, as a `KV` of that one layer, and verified by then.

    **Nothing that was made of its layers may be served before the loop over it has ended without an
    error**: a later layer may turn out damaged. Then `CorruptChunk` is raised out of the loop, the file
    is set aside, and what was written so far is to be thrown away; `ChunkStore.get_canonical` tells
    whether another tier has the chunk. After the loop `record` is the whole of it.

    Use it in a ``with``: leaving that early gives up the rest. Not to be shared between threads. The
    tensors must not be written in place, and those of a layer are the ones in `record`.
    """

    kind = "canonical"

    def __init__(
        self,
        head: CanonicalHead,
        layers: Iterator[KV],
        finish: Callable[[], CanonicalRecord],
        close: Callable[[], None],
    ) -> None:
        self.head = head
        self._layers = layers
        self._finish = finish
        self._close = close
        self._record: CanonicalRecord | None = None
        self._closed = False
        forks.bind(self, LayerStream._forked)
        self.refused: Callable[[CorruptChunk], None] = lambda error: None
        """Told of damage that is found in the loop."""

    @classmethod
    def of(cls, record: CanonicalRecord) -> LayerStream:
        """The layers of a record that is at hand."""
        layers = (layer_of(record.kv, index) for index in range(len(record.kv)))
        head = CanonicalHead(
            chunk_id=record.chunk_id,
            context=record.context,
            input_ids=record.input_ids,
            positions=record.positions,
            inputs=record.inputs,
            info=record.info,
            layers=tuple(tuple(layer) for layer in record.kv),
            loss=record.loss,
        )
        return cls(head, layers, lambda: record, lambda: None)

    @classmethod
    def reading(cls, reading: Reading, finish: Callable[[CanonicalRecord], None]) -> LayerStream:
        """The layers of ``reading``, which it closes; ``finish`` gets the record when all is verified.

        Raises as `Reading.wait`, and ``reading`` is closed then.
        """

        def layers() -> Iterator[KV]:
            yield from map(reading.layer, range(len(reading.header["layers"])))

        def end() -> CanonicalRecord:
            record = reading.record()
            assert isinstance(record, CanonicalRecord)
            finish(record)
            return record

        try:
            reading.wait(HEAD)
        except BaseException:
            reading.close()
            raise
        header, tensors = reading.header, reading.tensors
        head = CanonicalHead(
            chunk_id=header["chunk_id"],
            context=Context(**header["context"]),
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            inputs={name: tensors[f"inputs/{name}"] for name in header["inputs"]},
            info=header["info"],
            layers=tuple(map(tuple, header["layers"])),
            loss=Loss(**header["coded"]["loss"]) if "coded" in header else None,
        )
        return cls(head, layers(), end, reading.close)

    @property
    def record(self) -> CanonicalRecord:
        """All of it. `ValueError` before the loop over the layers has ended well."""
        if self._record is None:
            raise ValueError("the layers are not all read yet: go on to the end of the stream first")
        return self._record

    def __iter__(self) -> Iterator[KV]:
        return self

    def __next__(self) -> KV:
        if self._closed and self._record is None:
            raise ValueError("the stream was closed before its end: open it again")
        try:
            with contextlib.suppress(StopIteration):
                return next(self._layers)
            if self._record is None:
                self._record = self._finish()
                self.close()
        except CorruptChunk as error:
            self.close()
            self.refused(error)
            raise
        raise StopIteration

    def _forked(self) -> None:
        """The threads that read are the parent's."""
        forks.refuse(self, "_layers", "_finish")
        self._close = lambda: None

    def close(self) -> None:
        """Give up what is not read yet; may be called again."""
        self._closed = True
        self._close()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
