"""A canonical layer by layer, each verified when it comes, the rest still on its way."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.ops.quantize_kv import KV_CODECS, CodedKV
from kamera.store import ChunkStore, Context
from kamera.store.disk import reading as reading_module
from kamera.store.metrics import Metrics
from kamera.store.opened import Room
from kamera.store.records import kept

from .builders import CHUNK, CONTEXT, assert_same, bits, canonical
from .test_layers import damage, file_of

LAYERS = 5
SECRET = "a secret of many bytes"


def record_of(context: Context = CONTEXT, tokens: int = 40) -> Any:
    def number(seed: int) -> torch.Tensor:
        return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()

    layers = [{"k": number(2 * i), "v": number(2 * i + 1)} for i in range(LAYERS - 1)]
    return kept(canonical(context=context, tokens=tokens, kv=(*layers, {})))


RECORD = record_of()


@pytest.fixture(autouse=True, params=["inline", "threads"])
def threads(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "threads":
        monkeypatch.setattr(reading_module, "_INLINE", 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ChunkStore.open(tmp_path / "s") as store:
        store.put_canonical(RECORD)
    return tmp_path / "s"


def same(kv: Any, index: int, record: Any = RECORD) -> bool:
    [layer] = kv
    mine = record.kv[index]
    return layer.keys() == mine.keys() and all(bits(t) == bits(mine[name]) for name, t in layer.items())


@pytest.mark.parametrize("how", ["plain", "sealed", "encrypted", "memory"])
def test_a_stream_yields_what_the_record_has_and_ends_with_it(how: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {} if how in ("plain", "memory") else {"secret": SECRET}
    if how == "encrypted":
        options["keys"] = [b"k" * 32]
    place = "memory://" if how == "memory" else tmp_path / "s"
    with ChunkStore.open(place, **options) as store:
        assert store.open_canonical(CONTEXT, CHUNK) is None
        store.put_canonical(RECORD)
        if how != "memory":
            store._memory.clear()
        stream = store.open_canonical(CONTEXT, CHUNK)
        assert stream is not None
        with stream:
            head = stream.head
            assert (head.tokens, head.loss, head.info) == (RECORD.tokens, None, RECORD.info)
            assert bits(head.positions) == bits(RECORD.positions)
            assert head.inputs.keys() == RECORD.inputs.keys()
            assert [list(names) for names in head.layers] == [list(layer) for layer in RECORD.kv]
            with pytest.raises(ValueError, match="not all read yet"):
                _ = stream.record
            assert [same(kv, i) for i, kv in enumerate(stream)] == [True] * LAYERS
        assert_same(stream.record, RECORD)
        assert store.get_canonical(CONTEXT, CHUNK) is stream.record  # kept in memory, as by a get


@pytest.mark.parametrize("codec", KV_CODECS)
def test_layers_in_codes_come_in_codes(codec: str, tmp_path: Path) -> None:
    context: Context = replace(CONTEXT, kv=codec)
    record = record_of(context, 41)
    with ChunkStore.open(tmp_path / "s") as store:
        store.put_canonical(record)
        for _ in range(2):  # from memory, then from the disk
            stream = store.open_canonical(context, CHUNK)
            assert stream is not None and stream.head.loss == record.loss
            for index, kv in enumerate(stream):
                assert isinstance(kv, CodedKV) and same(kv, index, record)
            assert_same(stream.record, record)
            store._memory.clear()


@pytest.mark.parametrize("spoiled", range(LAYERS - 1))
def test_a_damaged_layer_is_refused_when_its_turn_comes(root: Path, spoiled: int) -> None:
    data = file_of(root).read_bytes()
    damage(file_of(root), data.index(bytes(bits(RECORD.kv[spoiled]["k"]))) + 5)
    with ChunkStore.open(root) as store:
        seen = 0
        with pytest.raises(CorruptChunk, match=rf"bytes of kv/0000{spoiled} have changed.*moved to"):
            for index, kv in enumerate(store.open_canonical(CONTEXT, CHUNK)):  # type: ignore[arg-type]
                assert same(kv, index)
                seen += 1
        assert seen == spoiled
        assert store.stats().memory.objects == 0 and len(store.quarantined()) == 1
        assert store.open_canonical(CONTEXT, CHUNK) is None
        assert store.get_canonical(CONTEXT, CHUNK) is None


@pytest.mark.parametrize("where", ["input_ids", "embeds"])
def test_damage_outside_the_layers_is_refused_before_the_stream_ends(root: Path, where: str) -> None:
    tensor = RECORD.input_ids if where == "input_ids" else RECORD.embeds["inputs_embeds"]
    damage(file_of(root), file_of(root).read_bytes().index(bytes(bits(tensor))) + 3)
    with ChunkStore.open(root) as store:
        with pytest.raises(CorruptChunk, match="moved to"):
            stream = store.open_canonical(CONTEXT, CHUNK)
            assert where == "embeds" and stream is not None
            assert sum(1 for _ in stream) == LAYERS
        assert store.stats().memory.objects == 0


def test_a_stream_left_early_keeps_nothing_and_lets_go_of_the_file(root: Path) -> None:
    with ChunkStore.open(root) as store:
        stream = store.open_canonical(CONTEXT, CHUNK)
        assert stream is not None
        with stream:
            assert same(next(stream), 0)
        assert store.stats().memory.objects == 0
        with pytest.raises(ValueError, match="not all read yet"):
            _ = stream.record
        with pytest.raises(ValueError, match="closed before its end"):
            next(stream)
        assert store.get_canonical(CONTEXT, CHUNK) is not None


def test_damage_that_is_found_in_the_loop_is_counted_as_a_refusal(root: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    damage(file_of(root), file_of(root).read_bytes().index(bytes(bits(RECORD.kv[2]["v"]))))
    with ChunkStore.open(root, metrics=Metrics(registry)) as store, pytest.raises(CorruptChunk):
        list(store.open_canonical(CONTEXT, CHUNK))  # type: ignore[arg-type]
    for name in ("kamera_store_integrity_refusals_total", "kamera_store_misses_total"):
        assert registry.get_sample_value(name, {"reason": "corrupt"}) == 1


def test_what_is_replaced_while_it_is_streamed_is_served_to_its_end_and_not_kept(root: Path) -> None:
    with ChunkStore.open(root) as store, ChunkStore.open(root) as other:
        stream = store.open_canonical(CONTEXT, CHUNK)
        assert stream is not None
        assert same(next(stream), 0)
        assert other.delete(RECORD.key)
        assert [same(kv, i) for i, kv in enumerate(stream, 1)] == [True] * (LAYERS - 1)
        assert store.stats().memory.objects == 0
        assert store.get_canonical(CONTEXT, CHUNK) is None


def test_a_layer_is_served_while_the_next_is_still_being_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "_INLINE", 0)
    go = threading.Event()
    fill = Room.fill

    def slow(self: Room, group: str) -> None:
        if group == "kv/00003":
            assert go.wait(60)
        fill(self, group)

    monkeypatch.setattr(Room, "fill", slow)
    with ChunkStore.open(root) as store:
        stream = store.open_canonical(CONTEXT, CHUNK)
        assert stream is not None
        assert [same(next(stream), i) for i in range(3)] == [True] * 3
        go.set()
        assert [same(kv, i) for i, kv in enumerate(stream, 3)] == [True] * 2


def test_many_streams_of_one_store_do_not_mix(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        streams = [store.open_canonical(CONTEXT, CHUNK) for _ in range(6)]
        for index, kvs in enumerate(zip(*streams, strict=True)):  # type: ignore[arg-type]
            assert all(same(kv, index) for kv in kvs)
        for stream in streams:
            assert stream is not None
            assert_same(stream.record, RECORD)
