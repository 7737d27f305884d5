"""Conversations whose cache is edited, not rebuilt, when their history changes."""

from kamera.sessions.anchors import Branches
from kamera.sessions.chat import ChatSession
from kamera.sessions.grammar import CallForm, Grammar, call_form, template_of
from kamera.sessions.layout import SessionMode, default_policy
from kamera.sessions.pool import PoolMetrics, SessionPool
from kamera.sessions.stream import Logprob, Stream, Turn, TurnReport

__all__ = [
    "Branches",
    "CallForm",
    "ChatSession",
    "Grammar",
    "Logprob",
    "PoolMetrics",
    "SessionMode",
    "SessionPool",
    "Stream",
    "Turn",
    "TurnReport",
    "call_form",
    "default_policy",
    "template_of",
]
