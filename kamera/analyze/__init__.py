"""What reuse can gain on a workload and lose on a model, before anything is served.

>>> requests = read_requests(engine, "requests.jsonl")
>>> table = recovery(requests)
"""

from kamera.analyze.example import example
from kamera.analyze.positions import auc, roc, sink
from kamera.analyze.repaid import breakeven, repaid
from kamera.analyze.requests import ids_of, read_requests
from kamera.analyze.workload import recovery, shift

__all__ = [
    "auc",
    "breakeven",
    "example",
    "ids_of",
    "read_requests",
    "recovery",
    "repaid",
    "roc",
    "shift",
    "sink",
]
