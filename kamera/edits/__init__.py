"""Edits of a conversation: directives, differences of two renderings, policies that edit messages."""

from kamera.edits import policies
from kamera.edits.clearing import Clearing, clearing_of
from kamera.edits.clients import Client, Foreseen
from kamera.edits.difference import Difference, difference
from kamera.edits.directive import Directive, Edit, Mode, Snap, Unit, resolve
from kamera.edits.examples import alike
from kamera.edits.messages import edit_messages
from kamera.edits.policy import (
    EditPolicy,
    PolicyFunction,
    PolicyName,
    apply_policy,
    check_policy,
    name_of,
    same,
)

__all__ = [
    "Clearing",
    "Client",
    "Difference",
    "Directive",
    "Edit",
    "EditPolicy",
    "Foreseen",
    "Mode",
    "PolicyFunction",
    "PolicyName",
    "Snap",
    "Unit",
    "alike",
    "apply_policy",
    "check_policy",
    "clearing_of",
    "difference",
    "edit_messages",
    "name_of",
    "policies",
    "resolve",
    "same",
]
