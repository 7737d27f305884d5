"""Measurements of `kamera.reuse` as a serve path: exact prompts, tiers, boundary states, first tokens."""
