"""Pictures that touch across a chunk border, on models whose pictures see their own later tokens.

Such a model takes a run of picture tokens for one picture. Two that touch see each other, so the first
one's KV depends on what comes behind it: no chunk of its own could be stored, moved or served exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kamera.content import TOKEN_TYPES, Encoded
from kamera.errors import IncompatibleChunk


def refuse_touching(kind: str, spans: Sequence[tuple[str, Encoded]]) -> None:
    """Raise IncompatibleChunk where of neighbours ``(chunk id, encoding)`` two pictures would be one to a
    model of the class ``kind``."""
    for (left, before), (right, behind) in itertools.pairwise(spans):
        if _is_picture(before, -1) and _is_picture(behind, 0):
            raise IncompatibleChunk(
                f"chunk {left[:12]} ends and chunk {right[:12]} begins with a picture, which "
                f"{kind} takes for one: begin or end chunks with text, or put text between them"
            )


def _is_picture(encoded: Encoded, token: int) -> bool:
    if not encoded.tensors:
        return False  # nothing was seen: the model masks it as text
    kinds = (encoded.position_inputs.get(name) for name in TOKEN_TYPES)
    return any(kind is not None and bool(kind[token]) for kind in kinds)
