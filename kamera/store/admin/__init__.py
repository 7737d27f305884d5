"""What stays and what goes: gc, pins, forgetting, bundles."""
