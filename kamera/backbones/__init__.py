"""A Hugging Face model behind one interface."""

from kamera.backbones.backbone import Backbone
from kamera.backbones.chunk import Chunk, Encoded
from kamera.backbones.describe import Description
from kamera.backbones.hooks import Observer
from kamera.backbones.media import load_image
from kamera.backbones.prove import Proof, prove_patch, prove_relocation
from kamera.backbones.video import Clip, read_video

__all__ = [
    "Backbone",
    "Chunk",
    "Clip",
    "Description",
    "Encoded",
    "Observer",
    "Proof",
    "load_image",
    "prove_patch",
    "prove_relocation",
    "read_video",
]
