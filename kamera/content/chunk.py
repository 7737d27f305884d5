"""Chunks: spans of tokens with the model inputs they need, ready to be prefilled anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from PIL import Image

from kamera.ops import chunk_id, whole_lists

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Per-token inputs, ``[tokens]`` in a chunk: 0 text, 1 image, 2 video."""

POSITION_INPUTS = (
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "video_second_per_grid",
    *TOKEN_TYPES,
)
"""Inputs from which, with the token ids, a model computes a chunk's positions."""


class _Copies(Mapping[str, torch.Tensor]):
    """Tensors by name, copied at every look-up: writing to one changes no other copy."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.own = {name: tensor.clone() for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.own[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.own.items()}
        return f"{shapes}"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Chunk:
    """One span of tokens that is stored and moved as a whole.

    ``id`` is a digest of the token ids and of every model input (processed pixels included), so two chunks of
    equal content are one chunk. ``input_ids`` is int64 ``[tokens]`` on the CPU; ``inputs`` are the model's
    keyword arguments for it, per-token ones as ``[tokens]``. ``fingerprint`` is that of the backbone that
    built it. ``picture`` is its first picture as it was given, only for display; None for text and for
    tensors.

    A chunk is a value: it copies its tensors on construction, ``input_ids`` and ``inputs`` return copies, and
    the id is a digest of its own. So an id always matches the content.
    """

    id: str
    fingerprint: str
    label: str
    inputs: Mapping[str, torch.Tensor]
    picture: Image.Image | None
    _ids: torch.Tensor

    def __init__(
        self,
        input_ids: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        fingerprint: str,
        label: str = "",
        picture: Image.Image | None = None,
    ) -> None:
        ids, copies = input_ids.clone(), _Copies(inputs)
        own = {
            "id": chunk_id(ids, copies.own),
            "fingerprint": fingerprint,
            "label": label,
            "picture": picture,
        }
        for name, value in (own | {"inputs": copies, "_ids": ids}).items():
            object.__setattr__(self, name, value)

    @property
    def input_ids(self) -> torch.Tensor:
        """Token ids, int64 ``[tokens]``."""
        return self._ids.clone()

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return int(self._ids.shape[0])

    @property
    def has_media(self) -> bool:
        """True if the vision tower has to encode it."""
        return any(name not in POSITION_INPUTS for name in self.inputs)

    def position_inputs(self) -> dict[str, torch.Tensor]:
        """The inputs that determine its positions: small, and stored with its KV."""
        return {name: self.inputs[name] for name in self.inputs if name in POSITION_INPUTS}

    def __repr__(self) -> str:
        media = " with media" if self.has_media else ""
        return f"Chunk({self.id[:12]}, {self.num_tokens} tokens{media}, {self.label!r})"


@dataclass(frozen=True, eq=False)
class Encoded:
    """A chunk as the decoder takes it, at any place: enough to prefill it again without its pixels.

    ``tensors`` are the decoder's keyword arguments from the full model (inputs_embeds, DeepStack features,
    …), entry 2 of a list as ``name.2``, in no order; empty for text, which is embedded again from
    ``input_ids``. ``chunk_id`` and ``label`` are the chunk's ("" for tokens that are none). ``heads`` are
    other texts that begin with as many equal tokens as is said, the most first. Raises ValueError for a list
    with a gap.
    """

    input_ids: torch.Tensor
    position_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    chunk_id: str = ""
    label: str = ""
    heads: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        whole_lists(self.tensors)

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return int(self.input_ids.shape[0])

    @property
    def is_text(self) -> bool:
        """True if its KV depends on its token ids and positions alone."""
        return not (self.tensors or self.position_inputs)

    @property
    def reads(self) -> frozenset[str]:
        """Ids of the chunks whose stored canonicals its own is read or made from."""
        return frozenset((self.chunk_id, *(head for head, _ in self.heads)))

    @property
    def arguments(self) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """``tensors`` as the decoder takes them: lists whole, by number."""
        return whole_lists(self.tensors)

    def behind(self, count: int) -> Encoded | None:
        """What is behind the first ``count`` tokens, none of which a picture replaces.

        None if a tensor is neither ``[1, tokens, …]`` nor the features of the picture's tokens alone.
        """
        tensors = dict[str, torch.Tensor]()
        for name, tensor in self.tensors.items():
            is_by_token = tensor.shape[:2] == (1, self.num_tokens)
            if not is_by_token and self.num_tokens in tensor.shape:
                return None
            tensors[name] = tensor[:, count:] if is_by_token else tensor
        return Encoded(self.input_ids[count:], {}, tensors)
