"""Loading the MODEL of a command."""

from __future__ import annotations

from pathlib import Path

from kamera.cli.options import Dtype
from kamera.engines.hf import Backbone, hide_progress


def load_backbone(name: str, device: str | None, dtype: Dtype, *, show_progress: bool) -> Backbone:
    """A backbone from a directory, a hub name, or ``testbed`` for the one that ships with Kamera.

    Raises UnsupportedBackbone, with the reason, if it does not load or is refused.
    """
    if not show_progress:
        hide_progress()
    source = name
    if name == "testbed" and not Path(name).exists():
        from kamera import testbed

        source = str(testbed.weights_dir())
    return Backbone.from_pretrained(source, device=device, dtype=dtype.value)
