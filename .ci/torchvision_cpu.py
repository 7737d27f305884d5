"""Import hook: PyPI's torchvision beside a torch without CUDA. A ``.pth`` file of the environment imports it.

The binary part of PyPI's torchvision is linked to CUDA and does not load there. Then its Python part fails at
import: it registers fakes for two operators that nobody has defined. They are defined here, in every process
of the environment (vLLM looks at models in one of its own). Nothing that vLLM or transformers use calls them.
"""

import importlib.abc
import sys


class _Define(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            from torch import library as operators

            defined = operators.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                defined.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch._kamera_torchvision = defined  # the definitions live as long as it does
        return None


sys.meta_path.insert(0, _Define())
