"""Prompts of real processors: what Kamera runs is what transformers makes of the whole history."""

from __future__ import annotations

import pytest

from tests.content.matrix import cells, covering, is_refused, verdict

EVERY = cells()
FEW = covering(EVERY)


@pytest.mark.parametrize("cell", FEW, ids="-".join)
def test_a_prompt_is_that_of_transformers(cell):
    assert verdict(cell).startswith(("plain", "refused" if is_refused(cell) else "equal"))


@pytest.mark.slow
@pytest.mark.parametrize("family", dict.fromkeys(cell.family for cell in EVERY))
def test_every_prompt_is_that_of_transformers(family):
    verdicts = {cell: verdict(cell) for cell in EVERY if cell.family == family}
    right = {cell: ("plain", "refused" if is_refused(cell) else "equal") for cell in verdicts}
    assert {cell: said for cell, said in verdicts.items() if not said.startswith(right[cell])} == {}


def test_few_cells_hold_each_pair_of_values():
    pairs = [("family", "speech"), ("family", "way"), ("speech", "way")]
    for one, other in pairs:
        held = {(getattr(c, one), getattr(c, other)) for c in FEW}
        assert held == {(getattr(c, one), getattr(c, other)) for c in EVERY}
    assert len(FEW) < len(EVERY) / 3
