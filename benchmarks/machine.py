"""Where and with what a figure was measured."""

from kamera.bench.machine import commit, machine

__all__ = ["commit", "machine"]
