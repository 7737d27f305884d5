"""Canonicals converted to codes: what codes can hold, once, the loss told; the source stays as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.ops import code_kv
from kamera.store import ChunkStore, StoreAdmin
from tests.cli.run import files
from tests.store.builders import CONTEXT, assert_same, canonical, patch


def finite(chunk: str, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    kv = ({name: torch.randn(2, 40, 64, generator=generator).bfloat16() for name in "kv"},)
    positions = torch.arange(40).expand(3, 40)
    return canonical(chunk, tokens=40, kv=kv, positions=positions)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ChunkStore.open(tmp_path / "s") as store:
        for i, name in enumerate("ab"):
            store.put(finite(name * 64, i))
        store.put(patch("a" * 64))
    return tmp_path / "s"


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_what_is_converted_is_what_putting_it_in_codes_gives(root: Path, tmp_path: Path, kv: Any) -> None:
    before = files(root)
    with ChunkStore.open(root) as source, ChunkStore.open(tmp_path / "t") as target:
        done = StoreAdmin(source).copy(target, kv=kv)
        coded = replace(CONTEXT, kv=kv)
        for i, name in enumerate("ab"):
            original = finite(name * 64, i)
            wanted = replace(original, context=coded, kv=code_kv(original.kv, kv))
            assert_same(target.get_canonical(coded, name * 64), wanted)
            assert target.get_canonical(CONTEXT, name * 64) is None
        assert (done.canonicals, done.present, done.patches, done.refused) == (2, 0, 0, ())
        kv_bytes = [sum(info.bytes for info in store.ls("canonical")) for store in (source, target)]
        assert kv_bytes[1] < kv_bytes[0] * (0.7 if kv == "int8" else 0.5)
        losses = [target.get_canonical(coded, name * 64).loss.relative for name in "ab"]  # type: ignore[union-attr]
        assert done.loss == max(losses) > 0
        again = StoreAdmin(source).copy(target, kv=kv)
        assert (again.canonicals, again.present) == (0, 2)
    assert files(root) == before


def test_conversion_refuses_values_without_codes(root: Path, tmp_path: Path) -> None:
    with ChunkStore.open(root) as store, ChunkStore.open(tmp_path / "t") as target:
        wild = canonical("c" * 64, kv=({"k": torch.full((1, 3, 4), float("nan"))},))
        names = [store.put(wild)]
        twice = replace(finite("d" * 64), context=replace(CONTEXT, kv="int4"))
        names.append(store.put(twice))
        done = StoreAdmin(store).copy(target, kv="int8")
        assert done.canonicals == 2 and len(done.refused) == 2
        assert all(any(name in line for line in done.refused) for name in names)
        assert any("codes of codes" in line for line in done.refused)
        with pytest.raises(ValueError, match="int8"):
            StoreAdmin(store).copy(target, kv="as-is")
