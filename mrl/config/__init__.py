"""Configuration: dataclasses are schema, defaults and documentation; YAML and the command line fill them in.

`schema` and the files named after sections say what a key means and may be, and `rules` what it contradicts.
`libraries` lists what may be passed on to Megatron and vLLM, and `verl_keys` answers keys of verl. `resolved` loads a
configuration by all of these.
"""
