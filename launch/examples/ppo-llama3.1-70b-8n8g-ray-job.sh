#!/bin/bash
# Written by `mrl launch ray`. Its directory with the runtime environment exists only during the call.
set -euo pipefail

# The cluster's token gives permission to run code there. Ray reads it from the file RAY_AUTH_TOKEN_PATH, with
# RAY_AUTH_MODE=token. Set both where you call this script.

# The runtime environment lists the files that are sent. Nothing else in the current directory is sent.
#   files: config.yaml, my_rewards.py
#   variables: none

# The entry point runs on the cluster, where `ray_address=auto` is the cluster itself. Without `--no-wait`, the command
# shows the run's output, and exits with its exit code.
/shared/mrl/.venv/bin/python -m ray.scripts.scripts job submit \
  --address=http://127.0.0.1:8265 \
  --runtime-env=DIRECTORY/runtime_environment.json \
  --no-wait \
  -- mrl train config.yaml cluster.ray_address=auto
