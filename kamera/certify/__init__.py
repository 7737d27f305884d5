"""What each guarantee loses on a model, measured on one's own pictures or texts, or on Kamera's."""

from kamera.certify.material import contents_of
from kamera.certify.metrics import bootstrap, eta, eta_interval, kl
from kamera.certify.run import DEFAULT, DOCUMENTS, MEASURED, certify
from kamera.trust import CertifyReport, Estimate, Losses

__all__ = [
    "DEFAULT",
    "DOCUMENTS",
    "MEASURED",
    "CertifyReport",
    "Estimate",
    "Losses",
    "bootstrap",
    "certify",
    "contents_of",
    "eta",
    "eta_interval",
    "kl",
]
