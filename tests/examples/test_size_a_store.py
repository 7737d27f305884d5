"""The sizes that docs/stores.md gives are those of what is stored."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kamera import ChunkStore, KameraWindow
from kamera.engines.hf import describe
from kamera.ops import kv_bytes
from tests.models import samples, tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "size_a_store.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("size_a_store", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llama_mqa", "deepseek_v3", "deepseek_v32"])
def test_the_formula_gives_the_bytes_that_are_stored(example, family):
    backbone = tiny.backbone(family)
    shapes = example.shapes_of(backbone.model.config, family)
    assert shapes.kv(element=4) == describe(backbone).bytes_per_token
    store = ChunkStore.open("memory://")
    window = KameraWindow(backbone, store, torch.tensor([5, 6, 7, 8]))
    chunk = samples.chunk(backbone, samples.sample(family))
    window.append(chunk)
    window.flush()
    (info,) = store.ls("canonical")
    record = store.get_canonical(info.context, chunk.id)
    seen = store.get_encoding(record.vision, chunk.id) if record.vision else None
    encoded = {} if seen is None else seen.embeds
    assert kv_bytes(record.kv) == chunk.num_tokens * shapes.kv(element=4)
    inputs = sum(t.numel() * t.element_size() for t in encoded.values())
    assert inputs <= chunk.num_tokens * (shapes.embeds(element=4) + 16)  # and masks of a byte a token
    pictures = family.startswith("qwen")
    assert (inputs >= chunk.num_tokens * 4 * shapes.hidden) == pictures


def test_the_table_in_the_documentation_is_the_programs(example, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["size_a_store.py"])
    example.main()
    page = (EXAMPLE.parents[1] / "docs" / "stores.md").read_text()
    for line in capsys.readouterr().out.splitlines()[:-1]:
        assert line.rstrip() in page
