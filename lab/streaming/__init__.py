"""Streams of frames under every way of keeping a window: Kamera's and those of its rivals."""
