"""Read the cases of a benchmark and write the results of a peer's functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Function = Callable[[dict[str, Any]], dict[str, Any]]
"""Function from a case, with its arrays as tensors, to outputs by name."""


def answer(functions: Mapping[str, Function], cases_path: str, results_path: str) -> None:
    """Write each output of each function on each case, under NUMBER/FUNCTION/OUTPUT."""
    stored = np.load(cases_path, allow_pickle=False)
    results = {}
    for number in range(int(stored["num_cases"])):
        case: dict[str, Any] = json.loads(str(stored[f"{number}/settings"]))
        for key in stored.files:
            if key.startswith(f"{number}/") and not key.endswith("/settings"):
                case[key.split("/", 1)[1]] = torch.from_numpy(stored[key])
        for name, function in functions.items():
            for output, value in function(case).items():
                value = value.detach().numpy() if isinstance(value, torch.Tensor) else value
                results[f"{number}/{name}/{output}"] = np.asarray(value, dtype=np.float64)
    np.savez(results_path, **results)
