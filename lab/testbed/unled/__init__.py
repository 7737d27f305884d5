"""A backbone nobody led: trained on answers and captions only, no layer named.

`python -m lab.testbed.unled --out DIR` is the whole recipe. The loss is the next-token cross-entropy of
text; there is no term on attention, none at a chosen layer, and no batch that hides a frame from another.
"""
