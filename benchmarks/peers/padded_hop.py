"""One hop of a padded TensorDict, as other trainers use it, from a producer to a consumer actor, pickled by Ray.

Answers the same requests as `transfer_queue_hop.py`, in a separate process: its objects are twenty times as large and
must not disturb the store of another benchmark.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
import torch
from tensordict import TensorDict

MAX_RESPONSE_TOKENS = 8192


class End:
    """Either end of the hop."""

    def make(self, lengths: list[int], prompt_tokens: int) -> int:
        """Make the columns of a padded trainer for the same samples, in its types. Return their bytes."""
        count, width = len(lengths), prompt_tokens + MAX_RESPONSE_TOKENS
        whole, response = (count, width), (count, MAX_RESPONSE_TOKENS)
        self.rows = TensorDict(
            {
                "prompts": torch.zeros(count, prompt_tokens, dtype=torch.int64),
                "responses": torch.zeros(response, dtype=torch.int64),
                "input_ids": torch.zeros(whole, dtype=torch.int64),
                "attention_mask": torch.ones(whole, dtype=torch.int64),
                "position_ids": torch.zeros(whole, dtype=torch.int64),
                "response_mask": torch.ones(response, dtype=torch.int64),
                "rollout_log_probs": torch.rand(response),
                "token_level_scores": torch.zeros(response),
            },
            batch_size=[count],
        )
        return sum(int(column.nbytes) for column in self.rows.values())

    def produce(self) -> TensorDict:
        """Return the rows."""
        return self.rows

    def consume(self, rows: TensorDict) -> float:
        """Read every response token and log-prob."""
        return sum(float(rows[name].sum()) for name in ("responses", "rollout_log_probs"))


def main() -> None:
    """Serve requests until standard input ends."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    producer, consumer = (ray.remote(End).options(num_cpus=1).remote() for _ in range(2))
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "lengths" in request:
            answer = {"bytes": ray.get(producer.make.remote(request["lengths"], request["prompt_tokens"]))}
        else:
            began = time.perf_counter()
            ray.get(consumer.consume.remote(producer.produce.remote()))
            answer = {"seconds": time.perf_counter() - began}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
