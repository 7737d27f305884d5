"""The rivals: other repairs of reused KV, each in its strongest form, on the same relocated KV.

``name@m`` may store the bytes of a plain rank-``m`` patch; ``layers@p`` recomputes ``p`` % of the layers.
Importing this package makes their names known to `kamera.eval.arms.parse_arm`.
"""

from kamera.eval.arms import register_budgeted
from kamera.eval.baselines.cacheblend import CacheBlend
from kamera.eval.baselines.deviation_oracle import DeviationOracle
from kamera.eval.baselines.first_k import FirstK
from kamera.eval.baselines.low_rank_k import LowRankK
from kamera.eval.baselines.partial_layers import PartialLayers
from kamera.eval.baselines.query_oracle import QueryOracle
from kamera.eval.baselines.sink import AttentionSink
from kamera.eval.baselines.vlcache import VLCache

for _arm in (AttentionSink, FirstK, CacheBlend, DeviationOracle, VLCache, QueryOracle, LowRankK):
    register_budgeted(_arm.kind, _arm)
register_budgeted("layers", PartialLayers)

__all__ = [
    "AttentionSink",
    "CacheBlend",
    "DeviationOracle",
    "FirstK",
    "LowRankK",
    "PartialLayers",
    "QueryOracle",
    "VLCache",
]
