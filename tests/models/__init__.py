"""Tiny random models, inputs and processors that the tests of every room share."""
