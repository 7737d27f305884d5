"""Kamera inside vLLM: a connector that shows recipes in vLLM's pages, and fills stores from them.

Nothing outside this folder knows vLLM. This module imports none of it: `connector` does, in vLLM's processes.

>>> transfer = {
...     "kv_connector": "KameraConnector",
...     "kv_connector_module_path": "kamera.engines.vllm.connector",
...     "kv_role": "kv_both",
...     "kv_load_failure_policy": "recompute",
...     "kv_connector_extra_config": {"store": "/var/kamera"},
... }
"""
