"""Patch compilation as a job: read a plan, form and store what is missing, report."""

from kamera.compile.job import Job, Settings, Step, run_plan
from kamera.compile.plan import Plan, PlanError, PlannedWindow, read_plan
from kamera.compile.report import CompileReport, Counts, Failure

__all__ = [
    "CompileReport",
    "Counts",
    "Failure",
    "Job",
    "Plan",
    "PlanError",
    "PlannedWindow",
    "Settings",
    "Step",
    "read_plan",
    "run_plan",
]
