"""Moved content: prompts are cut into segments, compared with earlier ones, and served as far as trusted."""

from kamera.reuse.admission import Admission, Tier, admissions_after_run, admissions_of
from kamera.reuse.anchors import anchors_of
from kamera.reuse.cuts import cut_prompt, fixed_cuts
from kamera.reuse.discovery import Discovery, discovery_of
from kamera.reuse.index import ContentIndex, Found, Hit
from kamera.reuse.prompt import Media, Prompt, Span
from kamera.reuse.recut import Recut, recut
from kamera.reuse.reuser import Reused, ReusePlan, Reuser
from kamera.reuse.rules import DEFAULT_RULE, RULES, CutRule

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
