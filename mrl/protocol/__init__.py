"""The batch: rows of jagged columns, how they travel, and how the driver handles them without holding them."""

from __future__ import annotations

from mrl.protocol.columns import Jagged, RemoteColumn
from mrl.protocol.data_proto import DataProto

__all__ = ["DataProto", "Jagged", "RemoteColumn"]
