"""The command line: one file per verb."""

from kamera.cli.app import main

__all__ = ["main"]
