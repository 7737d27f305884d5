"""Patches in codes of one width, whatever their size: what `kamera.ops.budget` chooses by bytes."""

from __future__ import annotations

from kamera.ops import Bits, LowRank, Patch, floats, quantize


def coded_factors(low: LowRank, bits: Bits = 8) -> LowRank:
    """Both factors as codes of ``bits`` bits, one scale per column."""
    return LowRank(quantize(floats(low.left), bits), quantize(floats(low.right), bits))


def coded(patch: Patch, bits: Bits = 8) -> Patch:
    """All factors of a patch so."""
    layers = [{name: coded_factors(low, bits) for name, low in layer.items()} for layer in patch.layers]
    return Patch.of(layers, patch.groups)
