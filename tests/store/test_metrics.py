"""What is counted is what happened; without metrics nothing is, and prometheus-client is not needed."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from kamera import KameraWindow, ReusePolicy
from kamera.errors import CorruptChunk, StoreVersionError
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.metrics import Metrics
from kamera.store.remote import tier as remote_tier
from kamera.store.remote.guard import Breaker
from lab.reliability.redis_server import RedisServer
from tests.models import samples, tiny
from tests.store.builders import CONTEXT, canonical, encode, join, patch, split

prometheus = pytest.importorskip("prometheus_client")

CHUNK = "c" * 64


@pytest.fixture
def registry():
    return prometheus.CollectorRegistry()


@pytest.fixture
def store(tmp_path: Path, registry):
    with ChunkStore.open(tmp_path / "s", memory_limit=100_000, metrics=Metrics(registry)) as opened:
        yield opened


def misses(registry) -> dict[str, float]:
    """Reasons that were met, and how often."""
    (family,) = [f for f in registry.collect() if f.name == "kamera_store_misses"]
    return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


def file_of(store: ChunkStore, key: str) -> Path:
    return Path(store.url) / "objects" / f"{key}.safetensors"


def test_hits_are_counted_by_kind_and_misses_by_reason(store, registry) -> None:
    assert store.get_canonical(CONTEXT, CHUNK) is None
    store.put(canonical())
    store.put(patch())
    for _ in range(3):
        store.get_canonical(CONTEXT, CHUNK)
    store.get_patch(CONTEXT, CHUNK, ("x", "y"))
    store.get_patch(CONTEXT, CHUNK, ("y", "x"))
    assert registry.get_sample_value("kamera_store_hits_total", {"kind": "canonical"}) == 3
    assert registry.get_sample_value("kamera_store_hits_total", {"kind": "exact"}) == 1
    assert misses(registry) == {"absent": 2}
    assert registry.get_sample_value("kamera_store_get_seconds_count", {"outcome": "hit"}) == 4
    assert registry.get_sample_value("kamera_store_get_seconds_count", {"outcome": "miss"}) == 2
    assert registry.get_sample_value("kamera_store_put_seconds_count") == 2


def test_what_is_refused_is_a_miss_with_its_reason(store, registry) -> None:
    path = file_of(store, store.put(canonical()))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptChunk):
        store.get_canonical(CONTEXT, CHUNK)
    assert store.get_canonical(CONTEXT, CHUNK) is None
    outer, header, rest = split(encode(patch(), 7.0))
    newer = file_of(store, patch().key)
    newer.parent.mkdir(exist_ok=True)
    newer.write_bytes(join(outer, header | {"format": 999}, rest))
    with pytest.raises(StoreVersionError):
        store.get_patch(CONTEXT, CHUNK, ("x", "y"))
    assert misses(registry) == {"corrupt": 1, "absent": 1, "newer_format": 1}
    for reason, count in (("corrupt", 1), ("newer_format", 1), ("foreign", 0), ("wrong_key", 0)):
        value = registry.get_sample_value("kamera_store_integrity_refusals_total", {"reason": reason})
        assert value == count, reason


def test_a_foreign_object_is_a_reason_of_its_own(tmp_path, registry) -> None:
    secret = b"s" * 32
    with ChunkStore.open(tmp_path / "s", secret=secret, metrics=Metrics(registry), memory_limit=0) as store:
        path = file_of(store, store.put(canonical()))
        path = path if path.exists() else next((tmp_path / "s").rglob("objects/*.safetensors"))
        path.write_bytes(encode(canonical(), 7.0))  # intact, but nobody with the secret wrote it
        with pytest.raises(CorruptChunk):
            store.get_canonical(CONTEXT, CHUNK)
    assert misses(registry) == {"foreign": 1}


def test_bytes_are_told_by_tier_while_the_store_lives(tmp_path, registry) -> None:
    metrics = Metrics(registry)
    store = ChunkStore.open(tmp_path / "s", memory_limit="1MiB", metrics=metrics)
    store.put(canonical())
    store.get_canonical(CONTEXT, CHUNK)
    where = {"store": store.url}
    stats = StoreAdmin(store).stats()
    for tier, held in (("disk", stats.bytes), ("memory", stats.memory.bytes)):
        assert registry.get_sample_value("kamera_store_bytes", where | {"tier": tier}) == held > 0
        assert registry.get_sample_value("kamera_store_objects", where | {"tier": tier}) == 1
    assert registry.get_sample_value("kamera_store_memory_total", where | {"event": "hits"}) == 1
    store.close()
    assert registry.get_sample_value("kamera_store_bytes", where | {"tier": "disk"}) is None
    prometheus.generate_latest(registry)  # a closed store breaks no scrape
    del store
    gc.collect()
    assert registry.get_sample_value("kamera_store_hits_total", {"kind": "canonical"}) == 1


def test_two_stores_share_one_set_of_metrics(tmp_path, registry) -> None:
    metrics = Metrics(registry)
    with (
        ChunkStore.open(tmp_path / "a", metrics=metrics) as a,
        ChunkStore.open(tmp_path / "b", metrics=metrics) as b,
    ):
        for store in (a, b):
            store.put(canonical())
            store.get_canonical(CONTEXT, CHUNK)
        assert registry.get_sample_value("kamera_store_hits_total", {"kind": "canonical"}) == 2
        urls = {
            s.labels["store"] for f in registry.collect() if f.name == "kamera_store_bytes" for s in f.samples
        }
        assert urls == {a.url, b.url}


def test_a_window_counts_the_guarantee_of_every_chunk_it_brings(registry) -> None:
    backbone = tiny.backbone("llama_mqa")
    a, b = (backbone.chunk_from_tensors(samples.text_ids(9, seed)) for seed in (1, 2))
    system = torch.tensor([5, 6, 7, 8])
    with ChunkStore.open("memory://", metrics=Metrics(registry)) as store:
        policy = ReusePolicy(rank=64, certified=False, forms="always")
        KameraWindow(backbone, store, system, policy=policy).append(a)
        first = KameraWindow(backbone, store, system, policy=policy)
        first.recall(a.id)  # leading: as it is stored
        first.append(b)
        again = KameraWindow(backbone, store, system, policy=policy)
        again.recall(a.id)
        again.recall(b.id)  # by the patch that was formed
        other = KameraWindow(backbone, store, system, policy=policy)
        other.recall(b.id)
        other.recall(a.id)  # no patch of this order
        wanted = [slot.guarantee for window in (again, other) for slot in window.slots]

    def served(guarantee: str, source: str) -> float | None:
        labels = {"guarantee": guarantee, "source": source}
        return registry.get_sample_value("kamera_chunks_served_total", labels)

    assert wanted == ["exact", "patched", "exact", "exact"]
    # leading: a appended and twice recalled, b once recalled
    assert (served("exact", "copy"), served("exact", "forward"), served("patched", "copy")) == (4, 1, 1)
    assert served("exact", "new") == 1  # b, when it was appended behind a


def served_by(registry) -> dict[tuple[str, str], float]:
    (family,) = [f for f in registry.collect() if f.name == "kamera_chunks_served"]
    counts = (s for s in family.samples if s.name.endswith("_total") and s.value)
    return {(s.labels["guarantee"], s.labels["source"]): s.value for s in counts}


def test_every_way_to_a_place_is_counted_once(registry) -> None:
    """Appending what is new, recalling, appending what is stored, reordering; a slide brings nothing."""
    backbone = tiny.backbone("llama_mqa")
    a, b = (backbone.chunk_from_tensors(samples.text_ids(9, seed)) for seed in (1, 2))
    with ChunkStore.open("memory://", metrics=Metrics(registry)) as store:
        window = KameraWindow(
            backbone,
            store,
            torch.tensor([5, 6, 7, 8]),
            policy=ReusePolicy(rank=64, certified=False, forms="always"),
        )
        ways = {
            "append a": (lambda: window.append(a), {("exact", "copy"): 1}),  # leading: its canonical
            "append b": (lambda: window.append(b), {("exact", "new"): 1}),
            "evict b": (lambda: window.evict(window.slots[1]), {}),
            "recall b": (lambda: window.recall(b.id), {("patched", "copy"): 1}),
            "slide": (lambda: window.slide(1), {}),
            # behind what is not exact itself
            "append a, stored": (lambda: window.append(a), {("patched", "forward"): 1}),
            "reorder": (lambda: window.reorder([1, 0]), {("exact", "copy"): 1, ("patched", "copy"): 1}),
        }
        for name, (move, counted) in ways.items():
            before = served_by(registry)
            move()
            after = served_by(registry)
            grown = {
                key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)
            }
            assert grown == counted, name


def test_questions_and_layers_are_counted_apart_from_look_ups(store, registry) -> None:
    def sample(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, labels) or 0

    assert not store.has(CONTEXT, CHUNK)
    store.put(canonical())
    store.put(patch())
    assert store.has(CONTEXT, CHUNK) and store.has(CONTEXT, CHUNK, ("x", "y"))
    assert store.info(CONTEXT, CHUNK, ("x", "y")) and not store.info(CONTEXT, CHUNK, ("z",))
    assert store.info(CONTEXT, CHUNK)
    assert sample("kamera_store_asked_total", answer="there") == 4
    assert sample("kamera_store_asked_total", answer="absent") == 2
    assert misses(registry) == {} and sample("kamera_store_get_seconds_count", outcome="hit") == 0


def test_a_remote_that_dies_shows_in_every_metric_of_it(server: RedisServer, registry, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(remote_tier, "Breaker", partial(Breaker, clock=lambda: now[0]))
    url = server.url("timeout=60&retries=0&cooldown=15")
    with ChunkStore.open(url) as other:
        other.put(canonical("e" * 64))
    with ChunkStore.open(url, metrics=Metrics(registry)) as store:

        def of_remote(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {"store": store.url, **labels})

        def events() -> dict[str, float]:
            (family,) = [f for f in registry.collect() if f.name == "kamera_remote"]
            return {s.labels["event"]: s.value for s in family.samples}

        store.put(canonical())
        assert store.get_canonical(CONTEXT, "e" * 64) is not None
        assert store.get_canonical(CONTEXT, "f" * 64) is None
        alive = events()
        assert (alive["hits"], alive["misses"], alive["stored"]) == (1, 1, 1)
        assert (alive["failures"], alive["skipped"], alive["refused"]) == (0, 0, 0)
        assert {of_remote("kamera_remote_up", direction=way) for way in ("reads", "writes")} == {1}
        assert misses(registry) == {"absent": 1}
        assert of_remote("kamera_store_bytes", tier="disk") is None  # it has none
        server.kill()
        for _ in range(3):  # the third is not even tried
            assert store.get_canonical(CONTEXT, "f" * 64) is None
        assert not store.has(CONTEXT, "f" * 64)
        assert misses(registry) == {"absent": 1, "remote_dead": 3}
        assert registry.get_sample_value("kamera_store_asked_total", {"answer": "remote_dead"}) == 1
        store.put(canonical("d" * 64))
        assert store.flush(0.05).unsaved
        dead = events()
        assert dead["failures"] >= 3 and dead["skipped"] >= 1 and dead["stored"] == 1
        assert {of_remote("kamera_remote_up", direction=way) for way in ("reads", "writes")} == {0}
        assert of_remote("kamera_remote_pending_uploads") == 1
        server.start()
        now[0] = 15.0
        assert not store.flush(30).unsaved
        assert store.get_canonical(CONTEXT, "e" * 64) is not None  # it is in memory
        assert store.get_canonical(CONTEXT, "f" * 64) is None  # tries it, and is answered
        assert {of_remote("kamera_remote_up", direction=way) for way in ("reads", "writes")} == {1}
        assert of_remote("kamera_remote_pending_uploads") == 0 and events()["stored"] == 2
        assert misses(registry) == {"absent": 2, "remote_dead": 3}


def test_metrics_come_into_a_registry_and_out_of_it_whole() -> None:
    registry = prometheus.CollectorRegistry(auto_describe=True)
    foreign = prometheus.Counter("kamera_store_misses", "of somebody else", registry=registry)
    with pytest.raises(ValueError, match="kamera_store_misses"):
        Metrics(registry)
    registry.unregister(foreign)
    first = Metrics(registry)
    registry.unregister(first)
    assert list(registry.collect()) == []
    Metrics(registry).count("kamera_store_hits", "canonical")
    assert registry.get_sample_value("kamera_store_hits_total", {"kind": "canonical"}) == 1


def test_a_store_without_metrics_needs_no_prometheus(tmp_path) -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from kamera.store import ChunkStore\n"
        "from kamera.store.metrics import Metrics\n"
        f"ChunkStore.open({str(tmp_path / 's')!r}).close()\n"
        "try: Metrics()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "StoreError metrics need prometheus-client: pip install 'kamera-kv[metrics]'\n"
