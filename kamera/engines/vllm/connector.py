"""`KameraConnector`: vLLM's interface to Kamera, a thin one. Only vLLM imports it, by its module path.

In the scheduler's process it is a `SchedulerSide`, in each worker a `WorkerSide`; what one decides the other
carries out a step later. Loads are asynchronous for vLLM: a request waits for its load and enters a batch
when that is over, or is computed as if there were no Kamera when it failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.model_executor.models.utils import extract_layer_index

from kamera.content import LandmarkReader
from kamera.engines.vllm.counts import Counts
from kamera.engines.vllm.harvest import HarvestChunk, Harvester
from kamera.engines.vllm.identity import EngineIdentity, check_version
from kamera.engines.vllm.known import Least
from kamera.engines.vllm.layout import layout_of
from kamera.engines.vllm.metrics import ConnectorMetrics, ConnectorStats
from kamera.engines.vllm.pages import EnginePages
from kamera.engines.vllm.positions import Positions
from kamera.engines.vllm.prompts import PromptTables
from kamera.engines.vllm.scheduler import SchedulerSide
from kamera.engines.vllm.serving import PageLoad
from kamera.engines.vllm.stores import Stores
from kamera.engines.vllm.worker import WorkerSide
from kamera.errors import KameraError, UnsupportedBackbone, quote
from kamera.ops import PatchBudget
from kamera.store import parse_size
from kamera.trust import ReusePolicy

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


@dataclass
class EngineStep(KVConnectorMetadata):
    """What the workers do in one step."""

    loads: tuple[PageLoad, ...] = ()
    harvests: tuple[HarvestChunk, ...] = ()


class KameraConnector(KVConnectorBase_V1):
    """Shows recipes in vLLM's pages.

    ``kv_connector_extra_config``: ``store``, the url of a `ChunkStore`, and ``memory_limit`` of each
    tenant's; ``harvest``, bytes of KV that may wait to be stored (0, the default: nothing is read back), and
    ``rank`` and ``patch_bytes`` of the patches that are formed of it and served to recognised prompts, as in
    `ReusePolicy`; ``recognise``, the least guarantee of these prompts ("", the default: none is recognised).
    Raises UnsupportedBackbone at start for another vLLM, for a model whose KV does not move as a whole, for
    pages in 8 bits or shared out by tokens, and for more than one kind of page.
    """

    scheduler: SchedulerSide  # in the scheduler's process
    _worker: WorkerSide  # in a worker's, once it has pages

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_version(vllm_version)
        parallel = vllm_config.parallel_config
        if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
            raise UnsupportedBackbone(
                "pages that workers share out by tokens: start vLLM without decode_context_parallel_size and "
                "prefill_context_parallel_size"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        if not config.get_from_extra_config("store", ""):
            raise ValueError('kv_connector_extra_config lacks "store": give the url of a ChunkStore')
        if str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
            raise UnsupportedBackbone("pages in 8 bits: start vLLM with kv_cache_dtype='auto'")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedBackbone(
                "pages of several kinds (sliding or linear attention): no KV of it moves"
            )
        self._layout = layout_of(vllm_config.model_config.hf_text_config)
        self._stores = Stores(
            config.get_from_extra_config("store", ""),
            memory_limit=config.get_from_extra_config("memory_limit", "1GiB"),
        )
        self._budget = PatchBudget(
            config.get_from_extra_config("rank", ReusePolicy.rank),
            config.get_from_extra_config("patch_bytes", ReusePolicy.patch_bytes),
        )
        self._harvests = parse_size(config.get_from_extra_config("harvest", 0))
        self._counts: Counts | None = None
        self._threads: Harvester | PromptTables | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(
                self._stores,
                EngineIdentity(vllm_config),
                Positions(vllm_config.model_config),
                self._harvests > 0,
                self._tables(config.get_from_extra_config("recognise", "")),
            )
            if self.scheduler.tables is not None:
                self.scheduler.opener = _opener(vllm_config.model_config)
            self._counts = self.scheduler.counts

    def _tables(self, least: str) -> PromptTables | None:
        """What prompts without a recipe are recognised by. Raises ValueError for no guarantee."""
        if not least:
            return None
        if least not in get_args(Least):
            raise ValueError(f'"recognise": {quote(least)} is none of {", ".join(get_args(Least))}')
        block = self._vllm_config.cache_config.block_size
        self._threads = tables = PromptTables(self._stores, self._budget, cast(Least, least), block)
        tables.of("")  # most have no tenants: its rows are read while the engine starts
        return tables

    # -- workers ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The pages are there: find the layers that write them."""
        from vllm.distributed.parallel_state import get_tp_group

        layer_by_name = self._vllm_config.compilation_config.static_forward_context
        layers = [layer_by_name[name] for name in sorted(kv_caches, key=extract_layer_index)]
        workers = get_tp_group().cpu_group
        harvester = None
        if self._harvests and workers.rank() == 0:
            harvester = Harvester(self._stores, self._layout.layers, self._budget, self._harvests)
            self._threads, self._counts = harvester, harvester.counts
        pages = EnginePages(layers, self._layout, self._vllm_config.cache_config.block_size, workers)
        dtype = self._vllm_config.model_config.dtype
        self._worker = WorkerSide(self._stores, self._layout, pages, dtype, harvester)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the scheduler decided."""
        step = self._get_connector_metadata()
        assert isinstance(step, EngineStep)
        self._worker.load(step.loads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which loads are over, and which of them failed."""
        ended_ids, failed_ids = self._worker.take_ended()
        return KVConnectorTransferResults(finished_recving=ended_ids, failed_recving=failed_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request is in a batch before its load is over."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are read behind the last layer."""

    def wait_for_save(self) -> None:
        """Copy out what this step has completed; records are made of it elsewhere."""
        step = self._get_connector_metadata()
        assert isinstance(step, EngineStep)
        self._worker.harvest(step.harvests)

    # -- scheduler -------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Read the recipe, or recognise the prompt, and salt the request by what is supplied."""
        manager, local = self._kv_cache_manager, 0
        if self.scheduler.tables is not None and manager.prefix_cache_lookup_enabled(request):
            hashes = request.block_hashes
            _, local, _ = manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)
        self.scheduler.arrive(request, local)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are supplied behind those computed; (None, False) while a remote answers."""
        tokens = self.scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pages are there: load into them."""
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self.scheduler.begin_load(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The loads of this step."""
        self.scheduler.encodes += sum(map(len, scheduler_output.scheduled_encoder_inputs.values()))
        token_counts = scheduler_output.num_scheduled_tokens
        return EngineStep(
            self.scheduler.take_loads(), self.scheduler.take_harvests(token_counts, self._kv_cache_manager)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads that failed: their requests are computed."""
        failed_ids = connector_output.failed_recving or set()
        self.scheduler.fail_loads(failed_ids)
        self.scheduler.count_loaded((connector_output.finished_recving or set()) - failed_ids)

    def request_finished(self, request: Any, block_ids: Iterable[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over."""
        self.scheduler.leave(request.request_id)
        return False, None

    # -- metrics -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What this side counted since the last call."""
        counts = self._counts and self._counts.take()
        return ConnectorStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Counts that came from another process."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ConnectorMetrics:
        """The counters of vLLM's end point."""
        return ConnectorMetrics(*args)

    def shutdown(self) -> None:
        """Finish the harvest, and close the stores."""
        if self._threads is not None:
            self._threads.close()
        self._stores.close()


def _opener(config: Any) -> int | None:
    """The token that opens the turns of a model's chat template; None if it has none, or no such token."""
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        return LandmarkReader(cached_tokenizer_from_config(config)).opener
    except (KameraError, ValueError, TypeError, OSError) as error:
        logger.info("prompts are cut by their content alone: %s", error)
        return None
