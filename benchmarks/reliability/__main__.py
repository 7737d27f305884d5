"""Attacks on a store, and what they did to it: a row for each figure, and those that must be 0.

* ``kills``: writers are killed at the n-th call to the system, or at a moment (``--size`` kills).
* ``faults``: calls to the system fail, one at a time (``--size`` calls of each operation, 0: all of them).
* ``fuzz``: files are damaged, half of them with digests that fit (``--size`` mutations).
* ``writers``: processes and threads on one store (``--size`` operations of each thread).
* ``tenants``: strangers ask for what an owner stored (``--size`` pairs).
* ``remotes``: a server dies, hangs, is full or lies, and so does an object store (``--size`` operations).

    python -m benchmarks.reliability [kills faults fuzz writers tenants remotes] [--size N] [--seed 0]

The exit code is 1 if a figure is not 0 that must be.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.reliability import faults, fuzz, kills, remotes, tenants, writers

ATTACKS = {
    "kills": kills,
    "faults": faults,
    "fuzz": fuzz,
    "writers": writers,
    "tenants": tenants,
    "remotes": remotes,
}
NONE = {
    *("torn", "lost", "disagreements", "leftovers", "stuck", "other errors", "served", "differs", "wrong"),
    *("deadlocks", "failed", "written twice"),
    *("answered to strangers", "deleted by strangers", "look-ups whose steps told", "hidden from owners"),
}
"""Figures that must be 0."""


def measure(attack: str, size: int | None, seed: int) -> list[report.Row]:
    """The figures of an attack; of its own size where ``size`` is None."""
    module = ATTACKS[attack]
    found = module.run(module.SIZE if size is None else size, seed)
    return [
        {"attack": attack, "figure": name, "found": count, "must be": 0 if name in NONE else None}
        for name, count in found.items()
        if isinstance(count, int)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("reliability", __doc__)
    parser.add_argument("attacks", nargs="*", choices=[[], *ATTACKS], help="default: all")
    parser.add_argument("--size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.getLogger("kamera").setLevel(logging.ERROR)  # damage is what is asked for here
    rows: list[report.Row] = []
    for attack in options.attacks or ATTACKS:
        rows += measure(attack, options.size, options.seed)
        report.progress(f"{attack}: done")
    report.tell(options, "Attacks on a store", rows, size=options.size, seed=options.seed)
    return int(any(row["must be"] == 0 != row["found"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
