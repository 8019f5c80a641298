"""``python -m pycollective``."""

from __future__ import annotations

import sys

from pycollective.cli import main

sys.exit(main())
