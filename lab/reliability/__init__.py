"""What the store survives: one module per figure of ``docs/results/reliability.md``.

A module has ``SIZE: int``, the default of ``--size``, and ``run(size, seed)``, which returns the
figures as one JSON-able dict (numbers, texts, or a dict per row). What goes wrong is a figure as
well: ``run`` counts it and does not raise. An attack's is ``findings`` (`findings.Findings`): the
command ends with exit code 1 unless it is 0.
"""
