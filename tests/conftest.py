"""Settings every test runs under: offline, one thread, deterministic examples."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator

# Workers, and the processes that tests start, would each compile the package and the tests again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads change the order of sums, and a test never needs more than one; nor do the processes it starts:
# threads that share a busy core wait for each other, many times as long as they work.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import library as operators

torch.set_num_threads(1)
sys.dont_write_bytecode = False

settings.register_profile(
    "kamera",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kamera")

_LIBRARIES: list[operators.Library] = []


def _make_torchvision_importable() -> None:
    """Let a torchvision built for another torch be imported.

    Registries ship a CUDA-linked torchvision. Beside a CPU torch its C++ operators do not load, and its
    import fails because it registers fakes for two of them. Its Python transforms are all a processor
    uses. With a torchvision that fits torch (or none) this does nothing.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = operators.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # a library's operators live as long as it does


_make_torchvision_importable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives as long as the process: no garbage collection looks at it."""
    gc.disable()
    done = yield
    gc.freeze()
    gc.enable()
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of a test marked ``few(n)``, n cases run by default, drawn by their names; the others are slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.parent, item.originalname].append(item)
    for of_test in cases.values():
        (most,) = of_test[0].get_closest_marker("few").args
        for item in sorted(of_test, key=lambda item: zlib.crc32(item.name.encode()))[most:]:
            item.add_marker("slow")
