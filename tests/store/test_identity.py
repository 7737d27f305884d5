"""One field after another of what a KV depends on: change it, and the store misses; put it back, it hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from kamera.engines.hf import HfEngine
from kamera.ops import tensor_digest
from kamera.store import ChunkStore, Context
from tests.models import processors, tiny
from tests.store.builders import assert_same, canonical, patch


@dataclass
class Setting:
    """Everything a chunk's KV depends on, down to the pixels."""

    model: nn.Module
    processor: Any
    system: str = "You watch a camera."
    colour: int = 40
    tenant: str = "acme"
    secret: bytes = b"a secret of acme, 32 bytes long!"

    @classmethod
    def usual(cls) -> Setting:
        return cls(processors.matching_model(), processors.picture_processor())

    def open(self, root: Path) -> ChunkStore:
        return ChunkStore.open(root, tenant=self.tenant, secret=self.secret)

    def names(self) -> tuple[Context, str]:
        backbone = HfEngine(self.model, self.processor)
        anchor = tensor_digest(backbone.chunk(self.system).input_ids)
        picture = Image.new("RGB", (32, 32), (self.colour, 90, 160))
        chunk = backbone.chunk([{"image": picture}])
        return Context(backbone.fingerprint, anchor, self.tenant), chunk.id


def one_weight(setting: Setting) -> None:
    with torch.no_grad():
        setting.model.get_parameter("model.language_model.layers.1.mlp.up_proj.weight")[3, 5] += 1e-6


def an_adapter(setting: Setting) -> None:
    layer = setting.model.get_submodule("model.language_model.layers.0.self_attn.q_proj")
    layer.register_parameter("lora_A", nn.Parameter(torch.zeros(2, 64)))


def the_dtype(setting: Setting) -> None:
    tiny.cast(setting.model, torch.bfloat16)


def rotary_frequencies(setting: Setting) -> None:
    setting.model.get_submodule("model.language_model.rotary_emb").inv_freq.mul_(1.001)


def the_picture_size(setting: Setting) -> None:
    setting.processor = processors.picture_processor(longest_edge=32 * 32)


def one_system_word(setting: Setting) -> None:
    setting.system = "You watch the camera."


def one_grey_level(setting: Setting) -> None:
    setting.colour = 41


def the_tenant(setting: Setting) -> None:
    setting.tenant = "beta"


def the_secret(setting: Setting) -> None:
    setting.secret = b"a Secret of acme, 32 bytes long!"


CHANGES = [
    one_weight,
    an_adapter,
    the_dtype,
    rotary_frequencies,
    the_picture_size,
    one_system_word,
    one_grey_level,
    the_tenant,
    the_secret,
]
CHANGED: dict[str, tuple[Context, str]] = {}
"""What the changes came to, by their names."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one picture's canonical and patch."""
    root = tmp_path_factory.mktemp("identity") / "store"
    setting = Setting.usual()
    context, chunk = setting.names()
    with setting.open(root) as store:
        store.put(canonical(chunk, context))
        store.put(patch(chunk, context))
    return root


def test_nothing_changed_is_a_hit(root: Path) -> None:
    setting = Setting.usual()
    context, chunk = setting.names()
    with setting.open(root) as store:
        assert_same(store.get_canonical(context, chunk), canonical(chunk, context))
        assert_same(store.get_patch(context, chunk, ("x", "y")), patch(chunk, context))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_one_field_is_a_miss(root: Path, change: Callable[[Setting], None]) -> None:
    setting = Setting.usual()
    change(setting)
    context, chunk = setting.names()
    CHANGED[change.__name__] = context, chunk
    with setting.open(root) as store:
        assert store.get_canonical(context, chunk) is None
        assert not store.has(context, chunk)
        for kind in ("exact", "orbit"):
            assert store.get_patch(context, chunk, ("x", "y"), kind) is None


def test_every_field_of_a_context_is_among_the_changes(root: Path) -> None:
    """A new field of `Context`, or a change that is forgotten above, makes this red. Runs behind it."""
    assert CHANGED.keys() == {change.__name__ for change in CHANGES}
    before, chunk = Setting.usual().names()
    changed = {
        name for c, _ in CHANGED.values() for name in vars(c) if getattr(c, name) != getattr(before, name)
    }
    assert changed | {"kv"} == {*vars(before)} - {"origin"}
    assert any(other != chunk for _, other in CHANGED.values())
    with Setting.usual().open(root) as store:  # the form of the KV is no part of a backbone
        assert store.get_canonical(replace(before, kv="int8"), chunk) is None
