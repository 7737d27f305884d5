"""Edits of a conversation: directives, differences of two renderings, policies that edit messages, verbs."""

from kamera.edits import policies
from kamera.edits.clearing import Cleared, Clearing, clearing_of
from kamera.edits.clients import Client, Foreseen
from kamera.edits.difference import Difference, difference
from kamera.edits.directive import Directive, Edit, Mode, Snap, Unit, resolve
from kamera.edits.items import of_items
from kamera.edits.messages import edited_messages
from kamera.edits.policy import EditPolicy, edited, same
from kamera.edits.verbs import Decay, Evict, Pin, Share, Span, Verb

__all__ = [
    "Cleared",
    "Clearing",
    "Client",
    "Decay",
    "Difference",
    "Directive",
    "Edit",
    "EditPolicy",
    "Evict",
    "Foreseen",
    "Mode",
    "Pin",
    "Share",
    "Snap",
    "Span",
    "Unit",
    "Verb",
    "clearing_of",
    "difference",
    "edited",
    "edited_messages",
    "of_items",
    "policies",
    "resolve",
    "same",
]
