"""Patches composed of singles and ordered pairs, against what else serves a window without its own."""
