"""Four attention families trained on the synthetic world of `kamera.testbed`, and how they were trained.

The package ships one of them (gqa); the weights of the others lie here.
"""

from .directories import BACKBONES, load, weights_dir
from .families import FAMILIES

__all__ = ["BACKBONES", "FAMILIES", "load", "weights_dir"]
