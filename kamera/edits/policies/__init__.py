"""Edit policies of common agents, which a saved session makes again; any other `EditPolicy` serves, too."""

from kamera.edits.policies.images import keep_last_images
from kamera.edits.policies.thinking import strip_thinking
from kamera.edits.policies.tools import clear_tool_results, drop_failed_tool_calls, truncate_tool_results
from kamera.edits.policies.turns import keep_all, keep_ends, summarise

__all__ = [
    "clear_tool_results",
    "drop_failed_tool_calls",
    "keep_all",
    "keep_ends",
    "keep_last_images",
    "strip_thinking",
    "summarise",
    "truncate_tool_results",
]
