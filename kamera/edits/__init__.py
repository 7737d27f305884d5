"""Edits of a conversation: directives, differences of two renderings, and policies that edit messages."""

from kamera.edits import policies
from kamera.edits.difference import Difference, difference
from kamera.edits.directive import Directive, Edit, Mode, Snap, Unit, resolve
from kamera.edits.messages import edited_messages
from kamera.edits.pieces import Fresh, Kept, Piece, pieces
from kamera.edits.policy import EditPolicy, edited

__all__ = [
    "Difference",
    "Directive",
    "Edit",
    "EditPolicy",
    "Fresh",
    "Kept",
    "Mode",
    "Piece",
    "Snap",
    "Unit",
    "difference",
    "edited",
    "edited_messages",
    "pieces",
    "policies",
    "resolve",
]
