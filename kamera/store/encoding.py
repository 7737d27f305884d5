"""A chunk's encoding as stored: the decoder's inputs, so that the vision tower never runs again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from kamera.ops import name_order, whole_lists
from kamera.store.fields import Header, bytes_of, check_identity, common_header, is_count
from kamera.store.keys import Context, object_key


@dataclass(frozen=True, eq=False)
class EncodingRecord:
    """The decoder's input for a chunk's pixels, which does not depend on the antecedents.

    ``context`` is a `keys.encoding_context`: the fingerprint of the vision part alone, no anchor. ``tokens``:
    of the chunk; ``embeds``: the decoder's arguments by name, entry 2 of a list as ``name.2``. Raises
    `ValueError` for invalid fields and a list with a gap.
    """

    kind: ClassVar[str] = "encoding"

    chunk_id: str
    context: Context
    tokens: int
    embeds: Mapping[str, torch.Tensor]
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_identity(self.chunk_id, self.context, self.info)
        if not is_count(self.tokens):
            raise ValueError(f"tokens must be a count, got {self.tokens!r}")
        whole_lists(self.embeds)

    @property
    def key(self) -> str:
        """The key of this record. Raises `ValueError` for a context that has an anchor or codes."""
        return object_key("encoding", self.context, self.chunk_id)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return bytes_of(self.tensors())

    def header(self) -> Header:
        """Everything but the tensors."""
        header = common_header(self.kind, self.key, self.chunk_id, self.context, self.tokens, self.info)
        return header | {"embeds": name_order(self.embeds)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """``embeds/…``; not copied."""
        return {f"embeds/{name}": tensor for name, tensor in self.embeds.items()}

    @classmethod
    def from_parts(cls, header: Header, tensors: Mapping[str, torch.Tensor]) -> EncodingRecord:
        """The record of `header` and `tensors`; `KeyError` names a tensor that is missing."""
        embeds = {name: tensors[f"embeds/{name}"] for name in header["embeds"]}
        context = Context(**header["context"])
        return cls(header["chunk_id"], context, header["tokens"], embeds, header["info"])
