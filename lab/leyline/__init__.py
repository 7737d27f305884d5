"""Leyline's experiments on the trained backbones: what follows the prompt before an edit, what the one after."""
