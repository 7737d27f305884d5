"""Leyline's experiments on the trained backbones: which prompt does an answer follow after an edit?"""
