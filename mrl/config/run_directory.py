"""The directory of a run: made once, readable by its owner alone, with the resolved configuration in it."""

from __future__ import annotations

import os
from pathlib import Path

from mrl.config.load import Resolved
from mrl.config.render import render
from mrl.errors import ConfigError, Problem


def create_run_directory(resolved: Resolved) -> Path:
    """Make `run.dir/run.name` with config.yaml and logs/ in it. A directory that holds anything is refused."""
    run = resolved.config.run
    directory = Path(run.dir, run.name)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            fix = "choose another run.name or run.dir, or move that directory away"
            raise ConfigError([Problem(str(directory), "run.name", "this directory holds a run already", fix)])
        directory.chmod(0o700)  # mkdir's mode is cut by the umask, and the directory may have been there, empty
        (directory / "logs").mkdir()
        (directory / "logs").chmod(0o700)
        # O_EXCL: of two runs that start at once with the same name, one stops here.
        config = os.open(directory / "config.yaml", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(config, "w", encoding="utf-8") as file:
            os.fchmod(config, 0o600)
            file.write(render(resolved))
    except OSError as error:
        what = f"the run directory cannot be made: {error.strerror}"
        raise ConfigError([Problem(error.filename or str(directory), "run.dir", what)]) from error
    return directory
