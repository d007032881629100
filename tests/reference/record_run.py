"""Record a whole run with Ray and vLLM to a file: `python -m tests.reference.record_run CONFIG FILE`.

Does the same as `mrl train`, plus a recorder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mrl.config.resolved.load import load_config
from mrl.observe.console import Console
from mrl.trainer.ppo import RayPPOTrainer
from mrl.trainer.run import open_run
from tests.reference.history import history
from tests.reference.recording import Recorder


def main(config: str, file: str) -> None:
    """Run to the end and write the recording."""
    resolved = load_config(config)
    with open_run(resolved, Console(resolved.config.training.steps)) as run:
        trainer = RayPPOTrainer(run)
        with trainer.init_workers():
            recorder = Recorder(trainer, Path(file).parent / "weights" / resolved.config.run.name)
            trainer.fit()
        recorded = recorder.recorded() | history(run.directory)
    Path(file).write_text(json.dumps(recorded))


if __name__ == "__main__":
    main(*sys.argv[1:])
