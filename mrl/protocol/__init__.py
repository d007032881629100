"""The batch: rows of jagged columns, their wire format, and references to columns that the driver does not hold."""

from __future__ import annotations

from mrl.protocol.columns import Jagged, RemoteColumn
from mrl.protocol.data_proto import DataProto

__all__ = ["DataProto", "Jagged", "RemoteColumn"]
