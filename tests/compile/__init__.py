"""Compiling plans."""
