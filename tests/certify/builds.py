"""Builds with one thing wrong in what serves, which `certify` has to tell.

A fault is put into every implementation of the serving kernels on this machine. What forms patches, and the
slow reference, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from kamera.ops import LayerLayout, LowRank, Patch
from kamera.ops.kernels import native_path, torch_path
from kamera.ops.kernels.dispatch import _triton
from kamera.ops.kernels.launches import Writing

Build = Callable[[], AbstractContextManager[None]]
Layers = list[dict[str, LowRank]]

THETA = 2.0


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Another attribute of a class or module, in the block."""
    true = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, true)


@contextmanager
def _kernels(change: Callable[[Writing], Writing]) -> Iterator[None]:
    triton = _triton()
    with ExitStack() as stack:
        for path in (native_path, torch_path, *([triton] if triton else [])):
            stack.enter_context(replaced(path, "write_kv", _changed(path.write_kv, change)))
        yield


def _changed(write: Callable[[Writing], None], change: Callable[[Writing], Writing]) -> Any:
    return lambda given: write(change(given))


def turned(*steps: int) -> Build:
    """Keys turned by the way along each axis times ``steps``."""

    def wrong(given: Writing) -> Writing:
        return given._replace(offset=tuple(n * way for n, way in zip(steps, given.offset, strict=False)))

    return lambda: _kernels(wrong)


def other_theta() -> Build:
    """Keys turned by another theta."""

    def wrong(given: Writing) -> Writing:
        return given._replace(layout=[_by_theta(spec) for spec in given.layout])

    return lambda: _kernels(wrong)


def patched(change: Callable[[Layers, Any], None]) -> Build:
    """Patches served with a change to their layers."""

    def wrong(given: Writing) -> Writing:
        if given.patch is None:
            return given
        layers = [dict(layer) for layer in given.patch.layers]
        change(layers, given.layout)
        return given._replace(patch=Patch.of(tuple(layers)).regroup(given.into.groups))

    return lambda: _kernels(wrong)


def _by_theta(spec: LayerLayout) -> LayerLayout:
    channels = []
    for c in spec.channels:
        if c.rope is not None:
            pairs = max(1, len(c.rope.inv_freq))
            turned = tuple(f * THETA ** (-i / pairs) for i, f in enumerate(c.rope.inv_freq))
            c = replace(c, rope=replace(c.rope, inv_freq=turned))
        channels.append(c)
    return replace(spec, channels=tuple(channels))


def _without(phased: bool) -> Callable[[Layers, Any], None]:
    def change(layers: Layers, layout: Any) -> None:
        for layer, spec in zip(layers, layout, strict=True):
            for name in [name for name in layer if (spec.channel(name).rope is not None) == phased]:
                del layer[name]

    return change


def _exchange(layers: Layers, layout: Any) -> None:
    layers[-1], layers[-2] = layers[-2], layers[-1]


PATCHES: dict[str, Build] = {
    "keys not patched": patched(_without(phased=True)),
    "values not patched": patched(_without(phased=False)),
    "layers exchanged": patched(_exchange),
}

ROTATIONS: dict[str, Build] = {
    "no rotation": turned(0, 0, 0),
    "axis t not rotated": turned(0, 1, 1),
    "axis h not rotated": turned(1, 0, 1),
    "axis w not rotated": turned(1, 1, 0),
    "wrong theta": other_theta(),
}
