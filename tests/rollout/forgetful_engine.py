"""An engine whose second replica keeps its first weights, but reports the digests of the new ones."""

from __future__ import annotations

from mrl.rollout.transformers_engine import TransformersEngine


class ForgetfulEngine(TransformersEngine):
    """Acts like kernels that keep their own copy of a parameter."""

    def _load(self, version: int) -> dict[str, str]:
        first = self.model
        digests = super()._load(version)
        if self.settings.replica.endswith("-1") and version > 1:
            self.model = first
        return digests
