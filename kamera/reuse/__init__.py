"""Moved content: prompts are cut into segments, compared with earlier ones, and served as far as trusted."""

from kamera.reuse.admission import Admission, Tier, admissions_after_run, admissions_of
from kamera.reuse.index import ContentIndex, Found, Hit
from kamera.reuse.prompt import (
    DEFAULT_RULE,
    RULES,
    CutRule,
    Media,
    Prompt,
    Span,
    anchors_of,
    cut_prompt,
    fixed_cuts,
)
from kamera.reuse.reuser import Discovery, Recut, Reused, ReusePlan, Reuser, discovery_of, recut

__all__ = [
    "DEFAULT_RULE",
    "RULES",
    "Admission",
    "ContentIndex",
    "CutRule",
    "Discovery",
    "Found",
    "Hit",
    "Media",
    "Prompt",
    "Recut",
    "ReusePlan",
    "Reused",
    "Reuser",
    "Span",
    "Tier",
    "admissions_after_run",
    "admissions_of",
    "anchors_of",
    "cut_prompt",
    "discovery_of",
    "fixed_cuts",
    "recut",
]
