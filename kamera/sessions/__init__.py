"""Conversations whose cache is edited, not rebuilt, when their history changes."""

from kamera.sessions.branches import Branches
from kamera.sessions.chat import ChatSession
from kamera.sessions.grammar import Grammar
from kamera.sessions.metrics import PoolMetrics
from kamera.sessions.modes import SessionMode, default_policy
from kamera.sessions.pool import SessionPool
from kamera.sessions.stream import Logprob, Stream
from kamera.sessions.tool_calls import CallForm, call_form, template_of
from kamera.sessions.turn import Turn, TurnReport

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
