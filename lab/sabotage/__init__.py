"""Arms that are wrong on purpose, and whether a table can tell: `python -m lab.sabotage`.

A bed of measurement (a world, a backbone, the questions asked) in which a sabotaged operator passes says
nothing of a sound one. Each arm here breaks one promise of the operator; a setup *sees* it where it answers
worse than the sound arm by more than chance.
"""
