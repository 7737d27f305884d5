"""Stored objects of chunks, and formation of missing ones, for windows and `kamera compile`."""

from kamera.patches.anchor import Anchor, anchor_of, identify, prefill_anchor
from kamera.patches.background import Ahead, Background, Owed, Priority, Ready, background_of, put_owed
from kamera.patches.catalogue import Catalogue, Near, Stored, possible_names, stored_patch, worth_harvesting
from kamera.patches.chunks import Before, compact_positions, form_of, prefix_kv, text_positions
from kamera.patches.former import Encodings, Former, canonical_of
from kamera.patches.losses import Losses, Strict
from kamera.patches.making import (
    Line,
    archive_later,
    await_archives,
    by_form,
    follow_later,
    harvest,
    keep_patch,
    patch_dropped,
    patch_to_put,
)
from kamera.patches.orbit import MOST_NEIGHBOURS, form_orbit, form_orders, ordering_count, orderings

__all__ = [
    "MOST_NEIGHBOURS",
    "Ahead",
    "Anchor",
    "Background",
    "Before",
    "Catalogue",
    "Encodings",
    "Former",
    "Line",
    "Losses",
    "Near",
    "Owed",
    "Priority",
    "Ready",
    "Stored",
    "Strict",
    "anchor_of",
    "archive_later",
    "await_archives",
    "background_of",
    "by_form",
    "canonical_of",
    "compact_positions",
    "follow_later",
    "form_of",
    "form_orbit",
    "form_orders",
    "harvest",
    "identify",
    "keep_patch",
    "ordering_count",
    "orderings",
    "patch_dropped",
    "patch_to_put",
    "possible_names",
    "prefill_anchor",
    "prefix_kv",
    "put_owed",
    "stored_patch",
    "text_positions",
    "worth_harvesting",
]
