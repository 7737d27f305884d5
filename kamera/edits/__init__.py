"""Edits of a conversation: directives, differences of two renderings, policies that edit messages."""

from kamera.edits import policies
from kamera.edits.clearing import Clearing, clearing_of
from kamera.edits.clients import Client, Foreseen
from kamera.edits.decay import GONE, begin_decay, due, followed, renewed, settled
from kamera.edits.difference import Difference, difference
from kamera.edits.directive import EDITS, Directive, Edit, Mode, Snap, Unit, Verb, resolve
from kamera.edits.examples import alike
from kamera.edits.messages import edit_messages
from kamera.edits.policy import (
    EditPolicy,
    PolicyFunction,
    PolicyName,
    apply_policy,
    ask_policy,
    check_policy,
    name_of,
    same,
)

__all__ = [
    "EDITS",
    "GONE",
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
    "Verb",
    "alike",
    "apply_policy",
    "ask_policy",
    "begin_decay",
    "check_policy",
    "clearing_of",
    "difference",
    "due",
    "edit_messages",
    "followed",
    "name_of",
    "policies",
    "renewed",
    "resolve",
    "same",
    "settled",
]
