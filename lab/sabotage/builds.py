"""Whole builds with one thing wrong in what serves, made from outside: each is a context to certify in.

A fault is put into every implementation of the serving kernels (`kernels`), into the live cache's moves, into
the formation of patches, into their look-up, or into the rotation wherever it is used. The slow reference is
left alone but for the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from kamera.certify import run
from kamera.certify.run import scenes_of
from kamera.certify.sabotage import THETA, Fault, Material, sabotages
from kamera.certify.trials import Trials
from kamera.engines.hf import HfEngine
from kamera.engines.hf.live import LiveCache
from kamera.ops import Patch, PatchBudget, RopeSpec, rope
from kamera.ops.kernels import native_path, torch_path
from kamera.ops.kernels.dispatch import _triton
from kamera.ops.kernels.stored import Writing
from kamera.patches import Former
from kamera.trust import ReusePolicy

Build = Callable[[], AbstractContextManager[None]]

SCENES = 12
"""Scenes of a probe whose patches are made stale: more than a certificate of 120 questions asks."""

LOOKED_UP = ("another chunk's patch", "stale patch")
"""Faults that need other patches than the one at hand; the rest can be put into a kernel."""


def builds(backbone: HfEngine) -> dict[str, Build]:
    """All wrong builds of a backbone, by what is wrong and where."""
    faults = sabotages(backbone.axes)
    found: dict[str, Build] = {
        f"{name}, in the kernels": _in_kernels(fault)
        for name, fault in faults.items()
        if name not in LOOKED_UP
    }
    found |= {
        f"{name}, when it is formed": _in_forming(backbone, faults[name])
        for name in ("K not patched", "layers exchanged", "layer dropped", "patch scaled")
    }
    found["another chunk's patch, looked up"] = _anothers_patches
    found["stale patch, looked up"] = lambda: _stale_patches(backbone)
    found["keys do not turn where they stand"] = _no_turn_in_place
    found["a moved span comes one token late"] = _moved_late
    found["a moved span leaves its free channels"] = _moved_without_free
    found["wrong theta, everywhere"] = lambda: _angles(_by_theta)
    found["no rotation, everywhere"] = lambda: _angles(lambda true, spec: 0 * true)
    return found


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Another attribute of a class or module, in the block."""
    true = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, true)


# -- kernels -----------------------------------------------------------------------------------------


def _paths() -> list[ModuleType]:
    """Every implementation of the serving kernels on this machine."""
    triton = _triton()
    return [native_path, torch_path, *([triton] if triton is not None else [])]


@contextmanager
def _writes(wrong: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for path in _paths():
            stack.enter_context(replaced(path, "write_kv", wrong(path.write_kv)))
        yield


def _in_kernels(fault: Fault) -> Build:
    """Kernels that serve all they are given with this fault."""

    def wrong(write: Callable[..., None]) -> Callable[..., None]:
        def served(given: Writing) -> None:
            none, groups = Patch.of([{} for _ in given.layout], given.into.groups), given.into.groups
            patch = given.patch or none
            given_of = Material(given.source, patch, given.layout, given.offset, none, none, seed=0)
            of = given_of.under(fault)
            held = None if given.patch is None else of.patch.regroup(groups)
            write(given._replace(patch=held, layout=of.layout, offset=of.offset))

        return served

    return lambda: _writes(wrong)


def _no_turn_in_place() -> AbstractContextManager[None]:
    """Kernels that leave a span that only turns as it stands."""

    def wrong(write: Callable[..., None]) -> Callable[..., None]:
        return lambda given: None if given.phased_only else write(given)

    return _writes(wrong)


# -- the live cache's moves --------------------------------------------------------------------------


def _moved_late() -> AbstractContextManager[None]:
    """A span that is copied within the live cache is read from one token further on."""
    copy = LiveCache._copy

    def wrong(self: LiveCache, source: Any, into: Any, run: Any) -> int:
        return copy(self, source, into, run._replace(out_of=run.out_of + 1))

    return replaced(LiveCache, "_copy", wrong)


def _moved_without_free() -> AbstractContextManager[None]:
    """Of a span that is copied within the live cache the phased channels alone arrive."""

    def wrong(self: LiveCache, source: Any, into: Any, run: Any) -> int:
        copied = 0
        for new, old, layers in zip(into.parts, source.parts, into.groups, strict=True):
            for c in self._model.layout[layers[0]].channels:
                if c.rope and not run.free:
                    part = old[c.name][:, :, run.out_of : run.out_of + run.length].clone()
                    new[c.name][:, :, run.to : run.to + run.length] = part
                    copied += part.nbytes
        return copied

    return replaced(LiveCache, "_copy", wrong)


# -- patches -----------------------------------------------------------------------------------------


def _in_forming(backbone: HfEngine, fault: Fault) -> Build:
    """Patches that are stored with this fault."""
    form = PatchBudget._form

    def wrong(self: PatchBudget, deltas: Any, layout: Any, canonical: Any) -> Any:
        sized = form(self, deltas, layout, canonical)
        held, still = sized.formed.patch, (0,) * backbone.axes
        of = Material(canonical, held, layout, still, held, held, seed=0).under(fault)
        return sized._replace(formed=sized.formed._replace(patch=of.patch))

    return lambda: replaced(PatchBudget, "_form", wrong)


def _anothers_patches() -> AbstractContextManager[None]:
    """A look-up that returns the patch of the chunk of this length that was looked up before."""
    look_up = Former.patch
    last: dict[int, tuple[str, Patch]] = {}

    def wrong(self: Former, facts: Any, *given: Any, **named: Any) -> Patch | None:
        found = look_up(self, facts, *given, **named)
        if found is None:
            return None
        other = last.get(facts.length, (facts.chunk_id, found))
        last[facts.length] = (facts.chunk_id, found)
        return other[1] if other[0] != facts.chunk_id else found

    return replaced(Former, "patch", wrong)


def _stale_patches(backbone: HfEngine) -> AbstractContextManager[None]:
    """A look-up that returns what was formed behind antecedents that have left since."""
    stale: dict[str, Patch] = {}
    for scene in itertools.islice(scenes_of("world"), SCENES):
        stale |= Trials(
            backbone, scene, ReusePolicy(certified=False, forms="always", audit=0.0)
        ).stale_patches
    look_up = Former.patch

    def wrong(self: Former, facts: Any, *given: Any, **named: Any) -> Patch | None:
        found = look_up(self, facts, *given, **named)
        return None if found is None else stale.get(facts.chunk_id, found)

    return replaced(Former, "patch", wrong)


# -- the rotation ------------------------------------------------------------------------------------


@contextmanager
def _angles(change: Callable[[torch.Tensor, RopeSpec], torch.Tensor]) -> Iterator[None]:
    """Other angles wherever anything is turned: patches are formed in the wrong frame, too."""
    true = RopeSpec.angles
    rope.rotation_table.cache_clear()
    try:
        with replaced(RopeSpec, "angles", lambda self, offset: change(true(self, offset), self)):
            yield
    finally:
        rope.rotation_table.cache_clear()


def _by_theta(true: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    pairs = max(1, len(spec.inv_freq))
    return true * torch.tensor([THETA ** (-i / pairs) for i in range(pairs)], dtype=true.dtype)


@contextmanager
def unproved(really: bool) -> Iterator[None]:
    """Certificates without proofs of the operator on tokens: what windows show has to tell alone."""
    with ExitStack() as stack:
        if really:
            stack.enter_context(replaced(run, "_flaw", lambda backbone: ""))
        yield
