"""How far operations and turns walk through the code, and what they write: ``python -m lab.walks``."""
