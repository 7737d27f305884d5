"""KV must be finite: one NaN or infinity in it poisons every token that attends to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from kamera.errors import NonFiniteKV
from kamera.ops.kv import KV


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True if no tensor holds a NaN or an infinity; integers hold none.

    Takes one sum per tensor, which is not finite if any entry is not, and one synchronisation per device.
    Entries are checked one by one only if the sum overflows.
    """
    given = [t for t in tensors if t.is_floating_point()]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in given:
        sums.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    if all(bool(torch.stack(some).isfinite().all()) for some in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in given)


def check_finite(kv: KV) -> None:
    """Raise NonFiniteKV for KV of a forward, naming the first layer, channel and token."""
    if all_finite([tensor for block in kv.parts for tensor in block.values()]):
        return
    for i, layer in enumerate(kv):
        for name, tensor in layer.items():
            bad = (~tensor.isfinite()).any(2).any(0).nonzero()
            if bad.numel():
                raise NonFiniteKV(
                    f"the forward gave KV that is not finite (layer {i}, channel {name}, token {int(bad[0])} "
                    f"of {tensor.shape[1]}, {_short(tensor)}): {_advice(tensor)}"
                )


def check_encoding(tensors: Mapping[str, torch.Tensor], chunk: str) -> None:
    """Raise NonFiniteKV for the encoding of a chunk, naming chunk and tensor."""
    if all_finite(tensors.values()):
        return
    name = next(n for n, t in tensors.items() if not all_finite([t]))
    raise NonFiniteKV(
        f"the encoding of chunk {chunk[:12]} is not finite ({name}, {_short(tensors[name])}): "
        f"look for NaN or inf in its pixels; {_advice(tensors[name])}"
    )


def check_deficit(x: torch.Tensor) -> None:
    """Raise NonFiniteKV for deficits that cannot be factored."""
    if not all_finite([x]):
        raise NonFiniteKV(f"a deficit of shape {tuple(x.shape)} is not finite: form it from finite KV")


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _advice(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.float16:
        return "float16 ends at 65504, load the model in bfloat16 or float32"
    return "look for NaN or inf in the weights and in the antecedents"
