"""Published benchmarks in their published formats, run on windows that reuse KV.

>>> from kamera.eval.tasks import MMNiah, run_task
>>> results = run_task(backbone, MMNiah(), "MM-NIAH", "out", arms=["reprefill", "blind", "patch@16"])
>>> [(arm.arm, arm.summary.official, arm.agreement) for arm in results.arms]
"""

from kamera.eval.tasks.milebench import MileBench
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.registry import NAMES, make_task
from kamera.eval.tasks.report import ArmResult, Results
from kamera.eval.tasks.run import run_task

__all__ = ["NAMES", "ArmResult", "MMNiah", "MileBench", "Results", "make_task", "run_task"]
