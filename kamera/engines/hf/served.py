"""A model that another engine runs: its processor, its configuration and the files that its name binds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch

from kamera.engines.base import Engine
from kamera.engines.checkpoint import checkpoint_fingerprint
from kamera.engines.hf.contents import HfContents
from kamera.engines.hf.load import dtype_of, folder_of, load_processor, skeleton
from kamera.engines.values import Work


class ServedModel(HfContents):
    """The part of an `Engine` that sessions over another engine use. No weight is loaded, and none can run.

    ``name`` and ``dtype`` are as in `Backbone.from_pretrained`. Its fingerprint is `checkpoint_fingerprint`
    of its files as they are now. Raises UnsupportedBackbone for files without safetensors, and for a model
    whose state is no relocatable KV.
    """

    def __init__(self, name: str | Path, *, dtype: str | torch.dtype = "auto") -> None:
        super().__init__(skeleton(name, dtype=dtype_of(dtype)), load_processor(name))
        self._fingerprint = checkpoint_fingerprint(folder_of(name), dtype=str(self.model.dtype))

    @property
    def engine(self) -> Engine:
        """Itself: nothing else of an engine is used over another one."""
        return cast(Engine, self)

    @property
    def identity(self) -> Any:
        """Itself: the engine that runs the model knows its files alone, and they were read."""
        return self

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def steady(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def measure(self, *, probes: bool = False) -> Iterator[Work]:
        """As `Engine.measure`: nothing is run here."""
        yield Work()
