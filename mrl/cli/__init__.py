"""The `mrl` command: one module per verb."""
