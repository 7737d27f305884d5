"""Upkeep of a store: gc, pins, forgetting, copies."""
