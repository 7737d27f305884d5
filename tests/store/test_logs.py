"""No log record of any refusal holds what the user wrote, showed, or what the model computed."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import KameraError
from kamera.store import Context, StoreAdmin
from tests.compile.saved import pictures, vision_backbone
from tests.store.builders import canonical

SYSTEM = "You guard the zeppelin hangar."
SECRETS = ("zeppelin", "hangar", "walrus", "quartz", "marigold")
QUESTION = "Which quartz key opens it?"


def spoil(root: Path, kind: str, store: ChunkStore) -> None:
    for info in store.ls(kind):
        path = root / "objects" / f"{info.key}.safetensors"
        data = bytearray(path.read_bytes())
        data[-20] ^= 0x10
        path.write_bytes(data)


def test_no_record_of_any_refusal_holds_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    root = tmp_path / "s"
    a, b = ([{"image": str(tmp_path / name)}, f"walrus {name}\n"] for name in pictures(tmp_path, 2))
    policy = ReusePolicy(rank=4, forms="always")

    def window(store: ChunkStore, system: str = SYSTEM) -> KameraWindow:
        return KameraWindow(vision_backbone(), store, system, policy=policy, max_tokens=500)

    with ChunkStore.open(root, memory_limit=0) as store:
        first = window(store)
        ids = [first.append(content).slot.chunk_id for content in (a, b)]
        first.flush()
        other = window(store)
        other.recall(ids[0])
        spoil(root, "exact", store)
        other.recall(ids[1])  # the patch is refused, and formed again
        spoil(root, "canonical", store)
        with pytest.raises(KameraError):
            window(store).recall(ids[1])
        window(store).append(b)  # archived again
        window(store, "You keep the marigold garden.").recall(ids[1])  # another anchor
        with pytest.raises(KameraError):
            window(store).recall("0" * 64)
        with pytest.raises(KameraError):
            store.put(canonical(context=Context("f", "a", "marigold")))
        first.next_token_logits(QUESTION)
        objects = list(root.glob("objects/*"))
        objects[0].write_bytes(b"walrus" * 100)
        StoreAdmin(store).verify()
        spoil(root, "canonical", store)
        StoreAdmin(store).verify()
        StoreAdmin(store).gc(0)
    (root / "index.sqlite").write_bytes(b"walrus" * 1000)
    with ChunkStore.open(root) as store:
        store.ls()
    ours = [record for record in caplog.records if record.name.startswith("kamera")]
    assert any("moved to" in record.getMessage() for record in ours)
    assert any("patch was refused" in record.getMessage() for record in ours)
    assert any("starting over" in record.getMessage() for record in ours)
    for record in ours:
        told = f"{record.getMessage()} {record.args!r} {vars(record)!r}"
        assert not [secret for secret in SECRETS if secret in told], told
        assert "tensor(" not in told and "array(" not in told
        held = record.args if isinstance(record.args, tuple) else (record.args,)
        assert not any(isinstance(value, torch.Tensor | np.ndarray | bytes) for value in held)
