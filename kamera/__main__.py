"""``python -m kamera``."""

import sys

from kamera.cli import main

sys.exit(main())
