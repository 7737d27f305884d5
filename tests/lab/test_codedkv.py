"""What codes cost, measured: the arms are what they say, and only a patch of the same form repairs them."""

from __future__ import annotations

import pytest

from kamera import ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from lab.codedkv import Table, markdown, measure


@pytest.fixture(scope="module")
def table() -> Table:
    steps = list(measure(HfEngine(*testbed.load()), "gqa", items=1, budget=ReusePolicy().budget))
    last = steps[-1]
    assert isinstance(last, Table) and len(steps) == 2
    return last


@pytest.mark.slow
def test_codes_lose_little_and_a_patch_repairs_it(table):
    rows = {row.arm: row for row in table.rows}
    assert {row.n for row in table.rows} == {rows["blind"].n} and table.episodes == 1
    assert rows["re-prefill"].kl == rows["re-prefill"].error == 0.0
    assert rows["blind"].kl > 100 * rows["int4, patch"].kl
    for codec in ("int8", "int4"):
        alone, own, other = (rows[f"{codec}{name}"] for name in (" alone", ", patch", ", patch of as-is"))
        assert alone.error == pytest.approx(alone.loss, rel=1e-3)  # nothing but the codes
        assert own.error < other.error
        assert own.loss == other.loss > 0
    assert rows["int4, patch"].error < rows["int4 alone"].error  # the patch holds most of what codes lost
    assert rows["int8 alone"].loss < rows["int4 alone"].loss / 8


@pytest.mark.slow
def test_shares_are_of_the_bytes_of_the_chunk(table):
    rows = {row.arm: row for row in table.rows}
    assert (rows["blind"].kv_share, rows["as-is, patch"].kv_share, rows["re-prefill"].kv_share) == (1, 1, 0)
    assert 0.25 < rows["int8, patch"].kv_share < 0.30 and 0.18 < rows["int4, patch"].kv_share < 0.21
    for arm in ("as-is, patch", "int8, patch", "int4, patch"):
        assert 0 < rows[arm].patch_share <= 0.25
    assert f"| gqa | int4, patch | {rows['blind'].n} |" in markdown([table])
