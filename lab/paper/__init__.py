"""The paper's tables, regenerated on the testbed's families: ``python -m lab.paper``.

One file per table (`deficit` … `modality`), the windows they share in `draw`, the driver in `run`, and
what is written in `report`, `verdicts` and `plots`.
"""
