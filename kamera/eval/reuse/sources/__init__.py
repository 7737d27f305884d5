"""Where items come from: the testbed's world, and published sets in their published layouts."""

from __future__ import annotations

from kamera.eval.reuse.sources import gui, mmlongbench_doc, ovo_bench, samples

SOURCES = {
    "mm-niah": samples.mm_niah,
    "muirbench": samples.muirbench,
    "ovo-bench": ovo_bench.read,
    "mmlongbench-doc": mmlongbench_doc.read,
    "gui-odyssey": gui.read,
}
"""Items of a set's folder, their windows of so many units at most, and problems of the data; each streams."""
TESTBED = "testbed"
NAMES = (TESTBED, *SOURCES)

__all__ = ["NAMES", "SOURCES", "TESTBED"]
