"""The laboratory: paper tables, patch experiments, speed, reliability, training. No part of the wheel.

Everything here imports `kamera`, never the other way, and runs from a checkout: ``python -m lab.paper``,
``lab.speed``, ``lab.reliability``, ``lab.walks`` and others.
"""
