"""Pictures that touch across a chunk border, on models whose pictures see their own later tokens.

Such a model takes a run of picture tokens for one picture. Two that touch see each other, so the first
one's KV depends on the tokens behind it: a chunk with it could not be stored, moved or served exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kamera.content import TOKEN_TYPES, Encoded
from kamera.errors import IncompatibleChunk


def refuse_touching(kind: str, spans: Sequence[tuple[str, Encoded]]) -> None:
    """Raise IncompatibleChunk if pictures of two neighbours ``(chunk id, encoding)`` would be one to a model
    of class ``kind``."""
    for (left, before), (right, behind) in itertools.pairwise(spans):
        if _is_picture(before, -1) and _is_picture(behind, 0):
            raise IncompatibleChunk(
                f"chunk {left[:12]} ends and chunk {right[:12]} begins with a picture, which "
                f"{kind} takes for one: begin or end chunks with text, or put text between them"
            )


def _is_picture(encoded: Encoded, token: int) -> bool:
    if not encoded.tensors:
        return False  # no picture was encoded: the model masks it as text
    kinds = (encoded.position_inputs.get(name) for name in TOKEN_TYPES)
    return any(kind is not None and bool(kind[token]) for kind in kinds)
