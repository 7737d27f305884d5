"""Patch compilation as a job: read a plan, form and store the missing objects, report."""

from kamera.compile.job import CompileJob, Step, run_plan
from kamera.compile.plan import PlanFile, PlannedWindow, read_plan
from kamera.compile.report import CompileReport, Failure, ObjectCounts, Settings
from kamera.errors import PlanError

__all__ = [
    "CompileJob",
    "CompileReport",
    "Failure",
    "ObjectCounts",
    "PlanError",
    "PlanFile",
    "PlannedWindow",
    "Settings",
    "Step",
    "read_plan",
    "run_plan",
]
