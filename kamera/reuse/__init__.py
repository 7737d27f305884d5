"""Moved content: prompts are cut into segments and compared with earlier ones. No forward."""

from kamera.reuse.cuts import cut, resets, sub_windows, windows
from kamera.reuse.file import IndexFile
from kamera.reuse.index import ContentIndex, Found, Hit
from kamera.reuse.prompt import Media, Prompt, Span
from kamera.reuse.recovery import Observer, Recovery, recovery
from kamera.reuse.rules import DEFAULT_RULE, RULES, CutRule
from kamera.reuse.scope import Scope, segment_key
from kamera.reuse.similar import Proposal, SimilarIndex

__all__ = [
    "DEFAULT_RULE",
    "RULES",
    "ContentIndex",
    "CutRule",
    "Found",
    "Hit",
    "IndexFile",
    "Media",
    "Observer",
    "Prompt",
    "Proposal",
    "Recovery",
    "Scope",
    "SimilarIndex",
    "Span",
    "cut",
    "recovery",
    "resets",
    "segment_key",
    "sub_windows",
    "windows",
]
