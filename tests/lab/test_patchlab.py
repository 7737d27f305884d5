"""The patch lab on the shipped backbone: what it says is spent is spent, and the winner wins."""

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.patchlab import Table, measure

ALL = "weighted, spread, 8 or 4 bits"
SHARES = (0.01, 0.03)


@pytest.fixture(scope="module")
def table():
    *steps, table = measure(HfEngine(*testbed.load()), items=16, fit=1, shares=SHARES)
    assert steps and isinstance(table, Table)
    return table


@pytest.mark.slow
def test_every_method_stays_in_its_budget(table):
    methods = {row.method for row in table.rows} - {"blind", "re-prefill"}
    assert len(table.rows) == 2 + len(methods) * len(SHARES)
    for row in table.rows:
        assert 0 <= row.spent <= row.share
        assert row.n >= 16
    assert all(row.spent > 0.9 * row.share for row in table.rows if row.method == ALL)


@pytest.mark.slow
def test_all_measures_together_reach_the_ceiling(table):
    rows = {(row.method, row.share): row for row in table.rows}
    ceiling, blind = rows["re-prefill", 1.0], rows["blind", 0.0]
    assert ceiling.kl == 0.0 and blind.accuracy.mean < ceiling.accuracy.mean - 0.5
    for share in SHARES:
        plain, best = rows["plain (bf16, one rank)", share], rows[ALL, share]
        assert best.eta > plain.eta
        assert best.kl <= rows["spread", share].kl
    assert rows[ALL, 0.03].accuracy.mean >= ceiling.accuracy.mean - 1 / 16
