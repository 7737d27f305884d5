"""Audits: a share of the KV that was served is prefilled again later; what is wrong is found and withheld."""

from __future__ import annotations

import pytest

from kamera import KameraWindow, ReusePolicy
from kamera.ops import kernels
from kamera.window import former_of
from tests.window.rig import FULL_RANK, QUESTION, make, rig

ALL = ReusePolicy(audit=1.0, rank=FULL_RANK, forms="always")


def withheld(window: KameraWindow) -> str | None:
    window.flush()
    return former_of(window).store.withheld.reason(former_of(window).context)


# -- right KV passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "kimi_k25", "deepseek_v2"])
def test_right_windows_pass_every_audit(family):
    backbone, (a, b, c, d) = rig(family)
    window = make(backbone, None, a, b, c, d, policy=ALL)
    for edit in (
        lambda: window.reorder([2, 0, 1, 3]),
        lambda: window.slide(),
        lambda: window.recall(c.id),
        lambda: window.reorder([1, 0, 2, 3]),
        lambda: window.condition(2, False),
    ):
        edit()
        window.next_token_logits(QUESTION)
        assert withheld(window) is None
    assert window.usage().background.forwards > 5


# -- wrong KV is found -------------------------------------------------------------------------------


def test_a_kernel_that_turns_wrongly_is_found(monkeypatch):
    backbone, (a, b, c, _) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, c, policy=ALL)
    assert withheld(window) is None
    from kamera.engines.hf import live

    plain = kernels.serve

    def wrong(into, kv, patch, layout, offset, **options):
        return plain(into, kv, patch, layout, tuple(o + 3 for o in offset), **options)

    monkeypatch.setattr(live, "serve", wrong)
    window.reorder([2, 0, 1])
    assert "audit of chunk" in withheld(window)


def test_a_patch_of_another_chunk_is_found(monkeypatch):
    backbone, (a, b, c, _) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, c, policy=ALL)
    window.reorder([2, 0, 1])
    assert withheld(window) is None
    former = window._stage.former
    plain = type(former).patch

    def scrambled(self, *args, **options):
        patch = plain(self, *args, **options)
        return None if patch is None else type(patch).of(patch.layers[::-1], patch.groups)

    monkeypatch.setattr(type(former), "patch", scrambled)
    assert window.reorder([1, 2, 0]).forwards == 0
    assert "its patch is off" in withheld(window)


# -- what follows ------------------------------------------------------------------------------------
