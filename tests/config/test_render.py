"""The resolved configuration as text loads as the same configuration, and shows the origin of each value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mrl.config.keys import schema_keys
from mrl.config.resolved.load import load_config
from mrl.config.resolved.render import leaves, render, render_difference, render_schema
from mrl.config.values import dotted

Write = Callable[..., str]


def test_rendered_configuration_has_each_value_with_its_origin(valid: str, write: Write) -> None:
    text = render(load_config(write(valid), ["critic=null", "placement.roles.critic=null", "algorithm.advantage=grpo"]))
    before, _, _ = text.partition("\ndata:\n")
    assert (
        before
        == """\
run:
  name: demo                                     # run.yaml:2
  dir: runs                                      # default
cluster:
  nodes: 1                                       # default
  devices_per_node: 4                            # run.yaml:4
  device: cpu                                    # run.yaml:5
  hardware: null                                 # default
  overfull: refuse                               # default
  numa_binding: true                             # default
  ray_address: null                              # default
  allow_insecure_ray: false                      # default
deadlines:
  resources_s: 120.0                             # default
  start_s: 300.0                                 # default
  engine_start_s: null                           # default
  download_s: 7200.0                             # default
  call_s: 1800.0                                 # default
  heartbeat_s: 5.0                               # default
  release_s: 2.0                                 # default
placement:
  pools:
    train: 4                                     # run.yaml:8
  roles:
    actor: train                                 # run.yaml:9
model:
  path: tiny/model                               # run.yaml:11
  critic: null                                   # default
  verify: true                                   # default
algorithm:
  advantage: grpo                                # command line
  options: {}                                    # default
  gamma: 1.0                                     # default
  lam: 1.0                                       # default
  lam_critic: null                               # default
  lam_length: null                               # default
  whiten: true                                   # default
  dpo_beta: 0.1                                  # default
  rae_decay: 0.95                                # default
  kl:
    where: loss                                  # run.yaml:14
    coef: 0.001                                  # default
    in_reward: k1                                # default
    in_loss: k3                                  # default
    target: null                                 # default
    horizon_samples: 10000                       # default
  loss:
    policy: ppo                                  # default
    options: {}                                  # default
    aggregation: token-mean                      # default
    horizon_tokens: null                         # default
    clip_low: 0.2                                # default
    clip_high: 0.2                               # default
    tau_pos: 1.0                                 # default
    tau_neg: 1.05                                # default
    cov_share: 0.0002                            # default
    cov_low: 1.0                                 # default
    cov_high: 5.0                                # default
    cov_kl_coef: 1.0                             # default
    m2_threshold: 0.04                           # default
    dro_beta: 0.05                               # default
    vespo_k_pos: 2.0                             # default
    vespo_lambda_pos: 3.0                        # default
    vespo_k_neg: 3.0                             # default
    vespo_lambda_neg: 2.0                        # default
    opsm_delta: null                             # default
    dual_clip: 3.0                               # default
    entropy_coef: 0.0                            # default
    log_entropy: true                            # default
    value_clip: 0.5                              # default
  dynamic_sampling: null                         # default
  overlong: null                                 # default
  correction: null                               # default
  old_log_probs: trainer                         # default
  router_replay: none                            # default
  keep_sampling_mask: false                      # default
  distillation: null                             # default"""
    )


VALUES: list[Any] = [
    "plain", "", " ", "two words", "yes", "No", "null", "~", "1e-6", "12", "1_000", "0x1f", "10:30", "2024-01-01",
    ".5", "a: b", "a #b", "#", "- a", "'", '"', "a\\b", "\\", "\t", "a\nb", "é", "\u2028", "\x85", "${run.dir}",
    "\\${run.dir}", "\\\\${x}", "a${", "$", "{a}", "[a]", "*a", "&a", "!a", "|", "=", "<<", "@x", "`x`", "%x",
    "???x", ".inf",
    1, -1, 0, 1.0, 1e-6, 1e300, float("inf"), float("-inf"), True, False, None,
    [], [1, "a b", None], {}, {"a": {}}, {"a": [{"b": "yes"}]}, {"yes": 1, "1": 2, "a b": 3, "": 4, "a: b": 5},
]  # fmt: skip


def test_what_is_rendered_loads_as_the_same(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    values = {f"value {number}": value for number, value in enumerate(VALUES)}
    rollout = dataclasses.replace(resolved.config.rollout, vllm={"hf_overrides": values})
    config = dataclasses.replace(resolved.config, rollout=rollout)
    again = load_config(write(render(dataclasses.replace(resolved, config=config)), "again.yaml")).config
    loaded = again.rollout.vllm["hf_overrides"]
    assert [repr(value) for value in loaded.values()] == [repr(value) for value in VALUES], "1, 1.0 and true differ"
    assert again == config


def test_difference(valid: str, write: Write) -> None:
    before, after = (
        load_config(write(valid)),
        load_config(write(valid, "b.yaml"), ["actor.optimizer={weight_decay: 1}"]),
    )
    assert render_difference(before, after) == (
        "- run.yaml\n+ b.yaml\n+ actor.optimizer.weight_decay: 1  # command line\n"
    )
    assert render_difference(after, before) == (
        "- b.yaml\n+ run.yaml\n- actor.optimizer.weight_decay: 1  # command line\n"
    )
    changed = load_config("b.yaml", ["actor.parallel.tp=4", "critic.parallel.tp=2"])
    assert render_difference(before, changed) == (
        "- run.yaml\n+ b.yaml\n- actor.parallel.tp: 2  # run.yaml:20\n+ actor.parallel.tp: 4  # command line\n"
    )
    assert render_difference(before, load_config("b.yaml")) == "", "origins alone are no difference"


def test_difference_in_type_alone(valid: str, write: Write) -> None:
    one, true = (load_config(write(valid), [f"rollout.vllm.hf_overrides.eager={value}"]) for value in ("1", "true"))
    assert "+ rollout.vllm.hf_overrides.eager: true" in render_difference(one, true)


def test_schema_lists_every_key_once_with_its_meaning() -> None:
    text = render_schema()
    assert "  prompts_per_step: whole number, at least 1; required\n      Prompts drawn for each step.\n" in text
    assert "  device: cpu | gpu; required\n" in text
    assert "  ray_address: one line of text | null; default null\n" in text
    assert "    Same keys as actor.\n" in text
    assert text.count("max_tokens_per_device:") == 4, "of actor and critic, reference, reward model and teacher"


def test_every_key_of_the_schema_has_a_meaning() -> None:
    assert [dotted(key.path) for key in schema_keys() if not key.doc] == []


def test_every_key_of_the_schema_is_rendered(valid: str, write: Write) -> None:
    resolved = load_config(write(valid))
    paths = {leaf.path for leaf in leaves(resolved)}
    for section in dataclasses.fields(resolved.config):
        assert any(path[0] == section.name for path in paths)
    assert len(paths) == len(list(leaves(resolved)))
