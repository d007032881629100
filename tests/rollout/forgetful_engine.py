"""An engine whose second replica goes on with the first weights that it got, and reports the digests of the new."""

from __future__ import annotations

from mrl.rollout.transformers_engine import TransformersEngine


class ForgetfulEngine(TransformersEngine):
    """What kernels do that keep a copy of their own of what is written into a parameter."""

    def _load(self, version: int) -> dict[str, str]:
        first = self.model
        digests = super()._load(version)
        if self.settings.replica.endswith("-1") and version > 1:
            self.model = first
        return digests
