"""Programs that print the figures of ``docs/results``. No part of the installed package."""
