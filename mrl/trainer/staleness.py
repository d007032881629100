"""How old the weights are that drew a batch, counted in updates of the policy."""

from __future__ import annotations

import numpy as np
import torch

from mrl.errors import AuditFailed
from mrl.protocol import DataProto
from mrl.protocol.columns import Jagged

NOBODY = -(1 << 31)
"""The age of a token that no weights drew."""


def with_staleness(batch: DataProto, version: int) -> DataProto:
    """Return the rows with the age of each token's weights, where it is known what drew them."""
    if "versions" not in batch.columns():
        return batch
    drawn = batch.values("versions")
    ages = torch.where(drawn < 0, NOBODY, version - drawn)
    return batch.with_column("staleness", Jagged(ages, batch.lengths("responses")))


def staleness_metrics(batch: DataProto, ahead: int) -> dict[str, float]:
    """Return figures of the ages; one that is beyond what may be ahead stops the run."""
    if "staleness" not in batch.columns():
        return {}
    ages = batch.values("staleness").numpy()
    of_rows = np.split(ages, np.cumsum(batch.lengths("responses"))[:-1])
    written = ages[ages != NOBODY]
    if written.min() < 0 or written.max() > ahead:
        what = f"tokens are {written.min()} to {written.max()} updates old, and asynchrony.ahead is {ahead}"
        raise AuditFailed(what, fix="this is a defect of mrl: the samples are not those that they are taken for")
    return {
        "async/staleness/mean": float(written.mean()),
        "async/staleness/max": float(written.max()),
        "async/versions_per_sample": float(np.mean([len(np.unique(row[row != NOBODY])) for row in of_rows])),
    } | {f"async/staleness/share_{age}": float((written == age).mean()) for age in range(ahead + 1)}
