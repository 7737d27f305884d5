"""The benchmark of reuse: what a context went through before a question, and what keeping it cost.

>>> from kamera.eval.reuse import ReuseBench, draw_items, freeze
>>> bench = freeze(draw_items("testbed", None, count=8), "bench", system="You watch a camera.", origin={})
>>> results = run_task(backbone, ReuseBench(), "bench", "out", system=bench.system)
>>> results.arm("patch@16").agreement
"""

from kamera.eval.reuse.draw import draw_items
from kamera.eval.reuse.frozen import Benchmark, freeze, load
from kamera.eval.reuse.item import Item
from kamera.eval.reuse.task import ReuseBench

__all__ = ["Benchmark", "Item", "ReuseBench", "draw_items", "freeze", "load"]
