"""Speed, measured: each benchmark compares its arms within one run and says how and where.

One file per benchmark, each with ``run(settings, step) -> Result`` (`kamera.bench.settings`), shown by
``kamera bench NAME``. Models are full-size in shape, random in weights (`kamera.bench.presets`); arms
take turns (`kamera.bench.timing`); results are tables and JSON (`kamera.bench.table`).
"""
