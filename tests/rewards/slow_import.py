"""A module whose import does not end."""

from __future__ import annotations

import time

time.sleep(1e6)
