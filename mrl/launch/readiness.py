"""`python -m mrl.launch.readiness CONFIG ADDRESS-OVERRIDE LIMIT NODE...`: returns when every node is up."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mrl.config.load import load_config
from mrl.controller import ray_cluster
from mrl.controller.survey import wait_for_nodes
from mrl.errors import MrlError


def main(argv: Sequence[str]) -> int:
    """0, or 1 with the names of the nodes that are not there."""
    path, override, limit_s, *names = argv
    cluster = load_config(path, [override]).config.cluster
    try:
        with ray_cluster(cluster):
            wait_for_nodes(names, cluster.device, cluster.devices_per_node, float(limit_s))
    except MrlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
