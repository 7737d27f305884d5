"""Certification of the KV below exact that a model may be served: a probe, its answers, a verdict."""

from kamera.certify.metrics import bootstrap, eta, kl
from kamera.certify.probe import TRIALS
from kamera.certify.run import ITEMS, certify
from kamera.certify.sabotage import fit_rows, random_like

__all__ = ["ITEMS", "TRIALS", "bootstrap", "certify", "eta", "fit_rows", "kl", "random_like"]
