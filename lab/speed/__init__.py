"""Speed, measured: each benchmark compares its arms within one run and says how and where.

One file per benchmark, each with ``run(settings, step) -> Result`` (`lab.speed.settings`), shown by
``python -m lab.speed NAME``. Models are full-size in shape, random in weights (`lab.speed.presets`); arms
take turns (`lab.speed.timing`); results are tables and JSON (`lab.speed.table`).
"""
