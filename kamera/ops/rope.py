"""Rotary phase: the position that a cached key carries, and its rotation to another.

A `RopeSpec` describes the phase *in the cache*: one angular frequency per rotated pair, the position axis of
that frequency, and the pairing of the feature dimension. It is probed from the live rotary module
(`kamera.engines.hf.probe`), never recomputed from a config.

Intentionally not applied here: `attention_scaling` (YaRN, longrope). It multiplies cos and sin when
the model writes a key, so a cached key carries it already; turning a key must not apply it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class RopeSpec:
    """The rotary phase of one channel.

    ``inv_freq[i]`` (radians per position) turns pair ``i`` by ``position[axes[i]] * inv_freq[i]``.
    Pair ``i`` is features ``(i, i + rotary_dim / 2)`` for pairing "half" (LLaMA, Qwen) and
    ``(2 i, 2 i + 1)`` for "interleaved" (GPT-J, GLM, ERNIE, DeepSeek-V2).
    """

    inv_freq: tuple[float, ...]
    axes: tuple[int, ...]
    num_axes: int
    pairing: Pairing
    attention_scaling: float = 1.0

    def __post_init__(self) -> None:
        if len(self.inv_freq) != len(self.axes):
            raise ValueError(
                f"inv_freq has {len(self.inv_freq)} pairs and axes {len(self.axes)}: "
                "give one axis per frequency"
            )
        if self.axes and not 0 <= min(self.axes) <= max(self.axes) < self.num_axes:
            raise ValueError(f"axes {set(self.axes)} are not in 0..{self.num_axes - 1}")
        if self.pairing not in ("half", "interleaved"):
            raise ValueError(f"pairing {self.pairing!r} is neither 'half' nor 'interleaved'")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # every layer of every move reads it; made of numbers alone, because hashes of strings differ between
        # processes and a pickled spec carries this one
        return hash((self.inv_freq, self.axes, self.num_axes))

    @property
    def rotary_dim(self) -> int:
        """Number of features that carry phase."""
        return 2 * len(self.inv_freq)

    def check_offset(self, offset: Sequence[int]) -> None:
        """Raise ValueError unless ``offset`` has one entry per axis."""
        if len(offset) != self.num_axes:
            raise ValueError(f"offset {tuple(offset)} has {len(offset)} axes, the phase has {self.num_axes}")

    def angles(self, offset: Sequence[int]) -> torch.Tensor:
        """Angle of every pair for a move by ``offset`` (one entry per axis): float64 ``[pairs]``."""
        self.check_offset(offset)
        steps = torch.tensor([float(offset[a]) for a in self.axes], dtype=torch.float64)
        return steps * torch.tensor(self.inv_freq, dtype=torch.float64)


@lru_cache(maxsize=128)
def rotation_table(
    spec: RopeSpec, offset: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of `RopeSpec.angles`, cast last: two ``[pairs]``, read-only.

    The layers of a model share one phase, and every layer of a chunk moves by the same offset, so the
    table is made once for all of them.
    """
    with torch.inference_mode(False):  # a table made in inference mode cannot be used outside of it
        angles = spec.angles(offset)
        return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)


def relocate(
    x: torch.Tensor, spec: RopeSpec, offset: Sequence[int], *, rotary_start: int = 0
) -> torch.Tensor:
    """Turn the phase of cached keys by ``offset``: R(δ)·x (paper, eq. 1).

    ``x`` is ``[..., tokens, dim]``; features ``rotary_start : rotary_start + rotary_dim`` are turned,
    the rest is passed through. ``offset`` holds one integer per position axis and is the same for
    every token. Angles are float64 and cast last; the product is done in float32 (float64 for float64
    input). A zero offset returns ``x`` itself, so a chunk that does not move keeps its bits.

    Always start from the copy the model computed: repeated rotation of a bf16 tensor drifts.
    """
    stop = rotary_start + spec.rotary_dim
    if x.shape[-1] < stop:
        raise ValueError(f"tensor has {x.shape[-1]} features, the phase needs {rotary_start}..{stop}")
    spec.check_offset(offset)
    if not any(offset) or spec.rotary_dim == 0:
        return x
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _rotate(x, spec, *rotation_table(spec, tuple(offset), work, x.device), rotary_start)


def _rotate(
    x: torch.Tensor, spec: RopeSpec, cos: torch.Tensor, sin: torch.Tensor, rotary_start: int
) -> torch.Tensor:
    """``x`` turned by angles that broadcast to ``[..., tokens, pairs]``, as a copy."""
    out, stop = x.clone(), rotary_start + spec.rotary_dim
    rotary = x[..., rotary_start:stop].to(cos.dtype)
    if spec.pairing == "half":
        first, second = rotary.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    out[..., rotary_start:stop] = turned.to(x.dtype)
    return out


def uniform_offset(old: torch.Tensor, new: torch.Tensor) -> tuple[int, ...] | None:
    """The offset per axis from positions ``old`` to ``new``, or None if tokens differ in it.

    Both are integer ``[axes, tokens]``. None means that the tokens moved against each other (for example
    a clip cut out of a longer one whose time grid was floored): their KV cannot be relocated.
    """
    if old.shape != new.shape:
        raise ValueError(f"positions {tuple(old.shape)} and {tuple(new.shape)} differ in shape")
    if old.shape[1] == 0:
        return (0,) * old.shape[0]
    steps = new.to(torch.int64) - old.to(torch.int64)
    if bool((steps != steps[:, :1]).any()):
        return None
    return tuple(int(s) for s in steps[:, 0].tolist())
