#!/bin/bash
# Made by `mrl launch ray`, whose directory for the runtime environment is there as long as the call takes.
set -euo pipefail

# Whoever has the cluster's token may run code there. Ray takes it from the file that RAY_AUTH_TOKEN_PATH names, with
# RAY_AUTH_MODE=token: both are set where this is called.

# The runtime environment says what travels; nothing else of the directory in which this is called does.
#   files: config.yaml, my_rewards.py
#   variables: none

# The entry point runs on the cluster, where `ray_address=auto` is the cluster itself. Without `--no-wait` this stays,
# shows the run's words, and leaves with its exit code.
/shared/mrl/.venv/bin/python -m ray.scripts.scripts job submit \
  --address=http://127.0.0.1:8265 \
  --runtime-env=DIRECTORY/runtime_environment.json \
  --no-wait \
  -- mrl train config.yaml cluster.ray_address=auto
