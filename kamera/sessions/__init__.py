"""Conversations whose cache survives every change of their history."""

from kamera.sessions.chat import ChatSession
from kamera.sessions.turn import Turn, TurnReport

__all__ = ["ChatSession", "Turn", "TurnReport"]
