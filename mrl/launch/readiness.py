"""`python -m mrl.launch.readiness CONFIG ADDRESS-OVERRIDE LIMIT NODE...`: returns when every node is up.

At the deadline it says which are not, and what would fit on those that are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mrl.config.load import load_config
from mrl.controller import ray_cluster
from mrl.controller.nodes import wait_for_nodes
from mrl.errors import MrlError, TooFewDevices
from mrl.plan.search import fits_on


def main(argv: Sequence[str]) -> int:
    """0, or 1 with the names of the nodes that are not there, and what to do without them."""
    path, override, limit_s, *names = argv
    resolved = load_config(path, [override])
    cluster = resolved.config.cluster
    try:
        with ray_cluster(cluster):
            wait_for_nodes(names, cluster.device, cluster.devices_per_node, float(limit_s))
    except MrlError as error:
        if isinstance(error, TooFewDevices):
            error.fix = "\n".join([error.fix, *fits_on(resolved, error.num_nodes)])
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
