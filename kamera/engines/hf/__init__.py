"""A Hugging Face model behind one interface."""

from kamera.engines.hf.backbone import Backbone, Description, describe
from kamera.engines.hf.contents import ServedModel
from kamera.engines.hf.engine import HfEngine
from kamera.engines.hf.load import hide_progress, load_model, load_processor
from kamera.engines.hf.prove import (
    OperatorProof,
    prove_cuts,
    prove_moves,
    prove_patch,
    prove_relocation,
)
from kamera.engines.hf.shipped import SHIPPED, weights_dir

__all__ = [
    "SHIPPED",
    "Backbone",
    "Description",
    "HfEngine",
    "OperatorProof",
    "ServedModel",
    "describe",
    "hide_progress",
    "load_model",
    "load_processor",
    "prove_cuts",
    "prove_moves",
    "prove_patch",
    "prove_relocation",
    "weights_dir",
]
