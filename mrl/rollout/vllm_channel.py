"""Calls between the processes of a vLLM engine whose data-parallel ranks are on several nodes.

Both ends prove that they know the engine's secret. Messages are msgpack: numbers, texts, lists and arrays, never code.
"""

from __future__ import annotations

import io
import socket
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec
import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from mrl.rollout.engine import EngineSettings

_ARRAY, _SAMPLE = 1, 2
_RETRY_S = 0.1


class VllmChannel:
    """One end of the connection between the first node of an engine and another."""

    def __init__(self, connected: socket.socket, address: str) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(connected.detach())
        self._address = address

    def send(self, message: Any) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message, enc_hook=_packed))

    def receive(self) -> Any:
        return msgspec.msgpack.decode(self.connection.recv_bytes(), ext_hook=_unpacked)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method on the other node, and wait for its answer."""
        try:
            self.send([method, *args])
            error, answer = self.receive()
        except (EOFError, OSError) as lost:
            raise ConnectionError(f"the engine's process on {self._address} does not answer: {lost!r}") from lost
        if error:
            raise RuntimeError(f"`{method}` failed on the engine's node {self._address}: {error}")
        return answer


def accept_followers(settings: EngineSettings) -> list[VllmChannel]:
    """Wait for the processes on the engine's further nodes. Return their channels in the order of the nodes."""
    channels: dict[int, VllmChannel] = {}
    own, secret = settings.nodes[0], settings.secret.encode()
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, settings.port), family=family, backlog=len(settings.nodes)) as listener:
        while len(channels) < len(settings.nodes) - 1:
            connected, (address, *_) = listener.accept()
            channel = VllmChannel(connected, address)
            try:
                deliver_challenge(channel.connection, secret)
                answer_challenge(channel.connection, secret)
            except (AuthenticationError, EOFError, ConnectionError):
                channel.connection.close()  # a stranger
            else:
                channels[channel.receive()] = channel
    return [channels[node] for node in sorted(channels)]


def connect_to_first(settings: EngineSettings) -> VllmChannel:
    """Connect to the process on the engine's first node, which may not listen yet."""
    first, secret = settings.nodes[0], settings.secret.encode()
    while True:
        try:
            channel = VllmChannel(socket.create_connection((first, settings.port)), first)
            answer_challenge(channel.connection, secret)
            deliver_challenge(channel.connection, secret)
            channel.send(settings.node)
        except (EOFError, ConnectionError):
            time.sleep(_RETRY_S)
        else:
            return channel


def _packed(value: Any) -> msgspec.msgpack.Ext:
    """Return an array, or what mrl reads of a finished sample."""
    if isinstance(value, RequestOutput):
        (sample,) = value.outputs
        log_probs = np.asarray(sample.logprobs.logprobs, np.float32)
        tokens = [np.asarray(ids, np.int32) for ids in (value.prompt_token_ids, sample.token_ids)]
        fields = [value.request_id, value.num_cached_tokens, *tokens]
        fields += [log_probs, sample.finish_reason, sample.routed_experts]
        return msgspec.msgpack.Ext(_SAMPLE, msgspec.msgpack.encode(fields, enc_hook=_packed))
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent to another node of an engine")
    body = io.BytesIO()
    np.save(body, value, allow_pickle=False)
    return msgspec.msgpack.Ext(_ARRAY, body.getvalue())


def _unpacked(code: int, body: memoryview) -> Any:
    if code == _ARRAY:
        return np.load(io.BytesIO(body), allow_pickle=False)
    fields = msgspec.msgpack.decode(body, ext_hook=_unpacked)
    key, num_cached, prompt, tokens, log_probs, reason, routes = fields
    flat = FlatLogprobs(logprobs=log_probs)
    sample = CompletionOutput(0, "", tokens, None, flat, routed_experts=routes, finish_reason=reason)
    return RequestOutput(key, None, prompt, None, [sample], finished=True, num_cached_tokens=num_cached)
