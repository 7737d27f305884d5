"""Certification: may this model be served less than exact KV? A probe, its answers, a verdict."""

from kamera.certify.metrics import Interval, bootstrap, eta, kl
from kamera.certify.run import ITEMS, certify, run_probe

__all__ = ["ITEMS", "Interval", "bootstrap", "certify", "eta", "kl", "run_probe"]
