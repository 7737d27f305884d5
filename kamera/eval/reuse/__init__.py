"""The benchmark of reuse: what a context went through before a question, and what keeping it cost.

>>> from kamera.eval.reuse import arms_named, draw_items, freeze, run_benchmark, score_submission
>>> bench = freeze(draw_items("testbed", None, count=8), "bench", system="You watch a camera.", origin={})
>>> submission = run_benchmark(backbone, bench, arms_named(["exact", "blind", "patch@16"]))
>>> score_submission(submission, bench).row("patch@16").agreement.mean
"""

from kamera.eval.reuse.draw import draw_items
from kamera.eval.reuse.frozen import Benchmark, freeze, load
from kamera.eval.reuse.item import Item, WindowTrace
from kamera.eval.reuse.run import arms_named, run_benchmark
from kamera.eval.reuse.scores import Scores, score_submission
from kamera.eval.reuse.submission import Submission, read_submission, schema

__all__ = [
    "Benchmark",
    "Item",
    "Scores",
    "Submission",
    "WindowTrace",
    "arms_named",
    "draw_items",
    "freeze",
    "load",
    "read_submission",
    "run_benchmark",
    "schema",
    "score_submission",
]
