"""Imports Megatron as `cpu_shim` needs it. Modules that import Megatron import this module first."""

from __future__ import annotations

from mrl.engine.cpu_shim import import_megatron

import_megatron()
