"""A Hugging Face model behind one interface."""

from kamera.engines.hf.backbone import Backbone
from kamera.engines.hf.describe import Description
from kamera.engines.hf.hooks import Observer
from kamera.engines.hf.load import hide_progress, load_processor
from kamera.engines.hf.model import ModelCache
from kamera.engines.hf.prove import Proof, precision, prove_cuts, prove_moves, prove_patch, prove_relocation
from kamera.engines.hf.recompute import Recomputed, Resume, hidden_states, recompute

__all__ = [
    "Backbone",
    "Description",
    "ModelCache",
    "Observer",
    "Proof",
    "Recomputed",
    "Resume",
    "hidden_states",
    "hide_progress",
    "load_processor",
    "precision",
    "prove_cuts",
    "prove_moves",
    "prove_patch",
    "prove_relocation",
    "recompute",
]
