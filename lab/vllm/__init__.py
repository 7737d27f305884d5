"""vLLM with the connector on the small trained backbones: an engine in a process, and what it ran."""
