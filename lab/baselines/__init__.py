"""The rivals: other repairs of reused KV, each in its strongest form, on the same relocated KV.

``name@m`` may store the bytes of a plain rank-``m`` patch; ``layers@p`` recomputes ``p`` % of the layers.
Importing this package makes their names known to `lab.arms.parse_arm`.
"""

from lab.arms import register_budgeted
from lab.baselines.cacheblend import CacheBlend
from lab.baselines.deviation_oracle import DeviationOracle
from lab.baselines.first_k import FirstK
from lab.baselines.low_rank_k import LowRankK
from lab.baselines.partial_layers import PartialLayers
from lab.baselines.query_oracle import QueryOracle
from lab.baselines.sink import AttentionSink
from lab.baselines.vlcache import VLCache

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
