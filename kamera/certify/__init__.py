"""Certification: may this model be served less than exact KV? A probe, its answers, a verdict."""

from kamera.certify.run import ITEMS, certify, run_probe

__all__ = ["ITEMS", "certify", "run_probe"]
