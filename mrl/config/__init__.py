"""Configuration: dataclasses are schema, defaults and documentation; YAML and the command line fill them in."""
