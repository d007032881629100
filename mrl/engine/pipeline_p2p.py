"""Exchange of shapes between pipeline stages, for a case in which Megatron's own way mixes up messages.

With two stages and several chunks per stage, the previous and the next stage are the same rank. Megatron sends the
shapes of both directions in one batch. Its messages are matched only by their order, and the two ranks use different
orders. Here shapes are sent like unbatched tensors in Megatron: ranks alternate who sends first, and each direction has
its own group.
"""

from __future__ import annotations

import mrl.engine.with_megatron  # noqa: F401

# isort: split
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.engine.parallel import ParallelGroups

_NUM_AXES = 3  # a pipeline message is [tokens, batch, hidden]


class OrderedP2PCommunicator(P2PCommunicator):  # type: ignore[misc]  # Megatron's class has no type information here
    """Megatron's communicator, with separate messages for the shapes of the two directions."""

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"

        def sent(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.tensor(x.shape, dtype=torch.int64, device=device)

        from_prev = torch.zeros(_NUM_AXES, dtype=torch.int64, device=device) if recv_prev else None
        from_next = torch.zeros(_NUM_AXES, dtype=torch.int64, device=device) if recv_next else None
        requests = p2p_communication._p2p_ops(
            tensor_send_prev=sent(tensor_send_prev),
            tensor_recv_prev=from_prev,
            tensor_send_next=sent(tensor_send_next),
            tensor_recv_next=from_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        shapes = [[0] * _NUM_AXES if shape is None else shape.tolist() for shape in (from_prev, from_next)]
        return shapes[0], shapes[1]


def pipeline_arguments(config: TransformerConfig, groups: ParallelGroups) -> dict[str, Any]:
    """Return extra arguments for the interleaved schedule over two stages; other schedules need none."""
    if groups.parallel.pp != 2 or groups.parallel.vpp == 1:
        return {}
    collection = ProcessGroupCollection()
    collection.tp, collection.cp, collection.pp = groups.tp, groups.cp, groups.pp
    collection.embd = parallel_state.get_embedding_group(check_initialized=False)
    collection.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    collection.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    collection.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return {"p2p_communicator": OrderedP2PCommunicator(groups.pp, config), "pg_collection": collection}
