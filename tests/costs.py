"""The cost of each test, recorded once, and the markers that follow from it.

``pytest --record-costs`` writes `TABLE`: processor seconds of a test and of the processes it waited for,
which is what the test takes on an idle core. Files that did not run keep their rows. Tests of at least
`COSTLY` seconds are marked ``costly``, those of the laboratory ``lab``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TABLE = Path(__file__).with_name("costs.json")
COSTLY = 2.0
"""Seconds of its dearest case from which on a test is ``costly``."""


class Cost(NamedTuple):
    """Seconds of a whole file, and those of the dearest case of each costly test in it, by name."""

    seconds: float
    costly: dict[str, float]


def table() -> dict[str, Cost]:
    """The recorded costs by file, as ``tests/ops/test_rope.py``."""
    return {name: Cost(*row) for name, row in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def spent() -> float:
    """Processor seconds of this process and its children so far."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-costs", action="store_true", help="write the cost of the tests that run to tests/costs.json"
    )


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    costs = table()
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if file.startswith("tests/lab/"):
            item.add_marker("lab")
        if file in costs and name.partition("[")[0] in costs[file].costly:
            item.add_marker("costly")
    if hasattr(config, "workerinput"):  # the dearest file first, so that all workers end at once
        items.sort(key=lambda item: -costs.get(item.nodeid.partition("::")[0], Cost(0.0, {})).seconds)


class Recorder:
    """Sums what tests cost: measured where they run, gathered and written by the process that was started."""

    def __init__(self) -> None:
        self._before = spent()
        self._cases: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = spent()
        report.cost, self._before = now - self._before, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._cases[report.nodeid] = self._cases.get(report.nodeid, 0.0) + report.cost

    def pytest_collection_finish(self) -> None:
        self._before = spent()  # imports are nobody's cost

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            write(self._cases)


def write(cases: dict[str, float]) -> None:
    """Put the seconds of each case, by node id, into `TABLE`."""
    found: dict[str, Cost] = {}
    for case, seconds in cases.items():
        file, _, name = case.partition("::")
        cost = found.setdefault(file, Cost(0.0, {}))
        test = name.partition("[")[0]
        dearest = max(cost.costly.get(test, 0.0), seconds)
        costly = cost.costly | ({test: round(dearest, 1)} if dearest >= COSTLY else {})
        found[file] = Cost(cost.seconds + seconds, costly)
    rows = {**table(), **{name: Cost(round(c.seconds, 1), c.costly) for name, c in found.items()}}
    there = {name: cost for name, cost in sorted(rows.items()) if (TABLE.parents[1] / name).exists()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(list(cost))}" for name, cost in there.items())
    TABLE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-costs"):
        config.pluginmanager.register(Recorder())
