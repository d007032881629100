"""A worker that takes prints of its model while the driver records a step."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from mrl.controller import Dispatch, register
from mrl.engine.tensor_prints import UpdateWatch, state_prints
from mrl.protocol.step_record import RankRecord, host_name
from mrl.workers.profiled import ProfiledWorker

if TYPE_CHECKING:
    from mrl.engine.engine import MegatronEngine


class RecordedWorker(ProfiledWorker):
    engine: MegatronEngine
    _watch: UpdateWatch | None = None

    @register(Dispatch.ONE_TO_ALL)
    def begin_record(self, gradients: bool, activations: bool) -> RankRecord:
        """Return prints of the state, and begin to watch updates."""
        self._watch = UpdateWatch(gradients=gradients, activations=activations)
        self.engine.watch = partial(self._watch.watching, self.engine)
        return self._record()

    @register(Dispatch.ONE_TO_ALL)
    def end_record(self) -> RankRecord:
        """Return prints of the state and of the updates since the beginning."""
        return self._record()

    @register(Dispatch.ONE_TO_ALL)
    def drop_record(self) -> None:
        """Forget the prints of updates, and stop watching them."""
        self.engine.watch = self._watch = None

    def _record(self) -> RankRecord:
        watch = self._watch
        assert watch is not None, "a record was begun"
        return RankRecord(asdict(self.place.coordinates), host_name(), state_prints(self.engine), watch.updates)
