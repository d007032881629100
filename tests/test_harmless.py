"""Warnings of other libraries from logs of real runs: harmless ones are dropped, the rest is kept."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mrl import harmless
from mrl.harmless import HARMLESS, HARMLESS_WITHOUT_GPU, harmless_dropped, is_harmless, without_harmless

ROOT = Path(__file__).resolve().parents[1]
VLLM = "(MainProcess pid=5935) WARNING 11-23 00:03:58"
SEEN = (  # with megatron-core 0.16.1, vLLM 0.31.0 and torch 2.13.0
    "site-packages/torch/distributed/c10d_logger.py:83: FutureWarning: `torch.distributed.all_gather_into_tensor` is "
    "deprecated. Please use `torch.distributed.all_gather_single` instead.",
    "megatron/core/transformer/transformer_config.py:1705: UserWarning: full scope is deprecated. Use empty "
    "cuda_graph_scope to capture the whole layer.",
    "site-packages/megatron/core/optimizer/optimizer.py:66: UserWarning: The .grad attribute of a Tensor that is not a "
    "leaf Tensor is being accessed. Its .grad attribute won't be populated during autograd.backward().",
    "Ignoring clean_up_tokenization_spaces=True for BPE tokenizer TokenizersBackend. The clean_up_tokenization post-",
    "vllm/triton_utils/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op` is deprecated, please use "
    "`torch.distributed.ReduceOp` instead",
    f"{VLLM} [input_processor.py:375] Passing raw prompts to InputProcessor is deprecated and will be removed",
    f"{VLLM} [arg_utils.py:1910] The global random seed is set to 0. Since VLLM_ENABLE_V1_MULTIPROCESSING is set to "
    "False, this may affect the random state of the Python process that launched vLLM.",
    f"{VLLM} [base.py:388] Using None for EOS token id because tokenizer is not initialized",
    f"{VLLM} [vllm.py:1706] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.",
    f"{VLLM} [vllm.py:1715] TORCH_COMPILE_DISABLE is set, disabling torch.compile.",
    f"{VLLM} [vllm.py:1750] Inductor compilation was disabled by user settings, optimizations settings that are only",
    f"{VLLM} [cpu_worker.py:180] sleep mode is not supported on CPU, ignore it.",
)
SEEN_WITHOUT_GPU = (
    "megatron/core/optimizer/__init__.py:24: UserWarning: Transformer Engine and Apex are not installed. Falling back "
    "to Torch optimizers.",
    "core/tensor_parallel/layers.py:738: UserWarning: When using async grad allreduce it is recommended to set "
    "the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup",
    "W1123 02:41:48.438000 25843 torch/_library/triton.py:53] Triton not available, find_triton_kernels = []",
    f"{VLLM} [cpu.py:207] Triton is not installed. triton-cpu is expected on x86 CPUs.",
    f"{VLLM} [vllm.py:747] Model Runner V2 requires Triton; using the V1 model runner instead.",
    f"{VLLM} [indexer_topk.py:35] Failed to import the DeepSelect extension (vllm._deepselect_C): No module named",
    f"{VLLM} [arg_utils.py:2940] This model does not officially support disabling chunked prefill.",
)
STAYS = (
    "optimizer.py:66: UserWarning: The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.",
    "[W1123 02:41:49.016176187 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy for memory allocation on the",
    f"{VLLM} [cpu_worker.py:114] libtcmalloc is not found in LD_PRELOAD. For best performance, please follow the",
    "W1123 torch/_dynamo/convert_frame.py:1] torch._dynamo hit config.recompile_limit (8)",
    "UserWarning: pinned memory needs CUDA: plain memory is used",
    "Fatal Python error: Segmentation fault",
)


def test_every_pattern_finds_what_was_seen_and_nothing_else() -> None:
    for rows, seen in ((HARMLESS, SEEN), (HARMLESS_WITHOUT_GPU, SEEN_WITHOUT_GPU)):
        for (pattern, _, _), line in zip(rows, seen, strict=True):
            assert [other for other in (*SEEN, *SEEN_WITHOUT_GPU, *STAYS) if re.search(pattern, other)] == [line]


@pytest.mark.parametrize("line", STAYS)
def test_what_a_user_may_act_on_stays(line: str) -> None:
    assert not is_harmless(line)
    assert without_harmless([line, "  its source", SEEN[0]]) == [line, "  its source"]


def test_the_line_of_source_below_a_warning_goes_with_it() -> None:
    seen = [SEEN[0], "  return func(*args, **kwargs)", "  indented, of another program", "loss 1.5", SEEN[-1], "  mine"]
    assert without_harmless(seen) == ["  indented, of another program", "loss 1.5", "  mine"]


@pytest.mark.skipif(harmless._HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_its_lack_means_nothing() -> None:
    assert all(map(is_harmless, SEEN_WITHOUT_GPU))


def test_a_command_shows_no_such_warning_of_its_own_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Drop a Python warning with its line of source code, and a library's log. Keep everything else."""
    dropped = warnings.formatwarning(
        SEEN[1].partition("UserWarning: ")[2], UserWarning, "megatron/config.py", 7, "warn()"
    )
    kept = warnings.formatwarning("pinned memory needs CUDA", UserWarning, "a.py", 7, "warn()")
    with harmless_dropped():
        handler = logging.StreamHandler()
        sys.stderr.write(dropped)
        handler.emit(logging.makeLogRecord({"msg": SEEN[3]}))
        sys.stderr.write(kept)
        handler.emit(logging.makeLogRecord({"msg": "it may end: \x1b[0m"}))
        assert not sys.stderr.isatty()
    assert capsys.readouterr().err == f"{kept}it may end: \x1b[0m\n"


@pytest.mark.needs
@pytest.mark.skipif(harmless._HAS_GPU, reason="there is a GPU")
def test_a_command_that_loads_megatron_says_nothing_but_its_own(tmp_path: Path) -> None:
    """`mrl eval` and `mrl export` load it, and `mrl sft`, `rm` and `dpo` for the model at the end."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    preset = ROOT / "configs" / "laptop-sft.yaml"
    (tmp_path / "config.yaml").write_text(f"extends: {preset}\nmodel: {{path: {tmp_path}/model}}\n")
    ran = subprocess.run(
        [sys.executable, "-m", "mrl.cli.main", "export", str(tmp_path), str(tmp_path / "out")],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[0].endswith('no checkpoint "latest"; saved steps: none'), ran.stderr
    assert "Warning" not in ran.stderr
