"""The `mrl` command: finds the verb, loads its module, and turns errors into messages and exit codes.

A verb is a module with `EXAMPLE` (one line to copy), `add_arguments(parser)` and `run(arguments) -> exit code`. If a
module serves several verbs, `arguments.called_as` is the current one. Only the module of the current verb is loaded, so
help and light verbs answer at once on a login node.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import mrl
from mrl.cli.supervise import EXIT_INTERRUPTED, on_interrupt
from mrl.errors import MrlError, did_you_mean
from mrl.harmless import harmless_dropped
from mrl.redaction import redact_text

VERBS = {
    "show": ("mrl.cli.show", "print the resolved configuration, how a run ended, the difference of two, or the schema"),
    "explain": ("mrl.cli.explain", "show the numbers of a configuration: batch arithmetic, ranks of each layout"),
    "algorithms": ("mrl.cli.algorithms", "list advantages, losses and estimators with paper, formula and options"),
    "import": ("mrl.cli.import_config", "make a configuration from a file of verl, slime, NeMo-RL or OpenRLHF"),
    "data": ("mrl.cli.data", "write a published data set as the files that presets expect"),
    "check": ("mrl.cli.check", "check everything that a run needs before it starts"),
    "plan": ("mrl.cli.plan", "show whether a configuration fits, its memory, and the time of a step"),
    "rehearse": ("mrl.cli.rehearse", "run each kind of rank at full size without GPUs, and measure its memory"),
    "verify": ("mrl.cli.verify", "compare layouts with one rank and transformers, or your own method with its formula"),
    "env": ("mrl.cli.env", "list versions and devices, and which parts of the stack work on this machine"),
    "train": ("mrl.cli.train", "train a model with a configuration"),
    "replay": ("mrl.cli.replay", "train a recorded step again, also in another layout, and compare the results"),
    "compare": ("mrl.cli.compare", "say which of two configurations or finished runs is better, and how sure that is"),
    "profile": ("mrl.cli.profile", "write a trace of a few steps over all processes, and what they waited for"),
    "diff": ("mrl.cli.diff", "find the first step, phase, token, tensor and rank in which two runs part"),
    "sft": ("mrl.cli.sft", "train a model on prompts and their answers"),
    "rm": ("mrl.cli.sft", "train a reward model on pairs of preferred and rejected responses"),
    "dpo": ("mrl.cli.sft", "train a policy on pairs of preferred and rejected responses, without a reward model"),
    "eval": ("mrl.cli.eval", "validate a model, or a checkpoint of a run, without training"),
    "rollout": ("mrl.cli.rollout", "generate and score samples without training, as data for sft, dpo and rm"),
    "launch": ("mrl.cli.launch", "start a run on a cluster, through Slurm or as a Ray job"),
    "export": ("mrl.cli.export", "write a checkpoint of a run as a model that transformers and vLLM load"),
    "report": ("mrl.cli.report", "write a report of a run as one HTML file"),
    "retriever": ("mrl.cli.retriever", "serve searches in a file of passages, for search agents"),
    "demo": ("mrl.cli.demo", "train a small model on this machine as a demonstration"),
}
QUICK_START = """\
mrl trains large language models with reinforcement learning. Start with:
  mrl env                  which parts work on this machine
  mrl show --schema        every key of a configuration with its meaning
  mrl --help               all verbs; mrl VERB --help for a single one
"""
EXIT_USAGE, EXIT_PIPE_CLOSED = 2, 141  # 141 is what a shell reports for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):  # escape characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with on_interrupt(lambda: "interrupted"), harmless_dropped():
            code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # flush here, so that a closed pipe is noticed here
        return code
    except MrlError as error:
        print(redact_text(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # another Ctrl-C would end the process by the signal while it exits
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED


def _run(argv: list[str]) -> int:
    if not argv:
        print(QUICK_START, end="")
        return 0
    name, *rest = argv
    if name.startswith("-"):
        _top_parser().parse_args(argv)  # --help and --version exit here; anything else is an error
    if name not in VERBS:
        print(f'mrl: unknown verb "{name}"; {did_you_mean(name, VERBS)}', file=sys.stderr)
        return EXIT_USAGE
    module, summary = VERBS[name]
    verb: Any = importlib.import_module(module)
    parser = argparse.ArgumentParser(
        prog=f"mrl {name}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {verb.EXAMPLE.format(verb=name)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(called_as=name)
    verb.add_arguments(parser)
    # Flags may come between overrides, but argparse does not support that for a verb with subverbs.
    parse = parser.parse_args if hasattr(verb, "SUBVERBS") else parser.parse_intermixed_args
    code: int = verb.run(parse(rest))
    return code


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="mrl",
        usage="mrl [--help | --version] VERB ...",
        description=f"verbs:\n{verbs}",
        epilog="example:\n  mrl env",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mrl {mrl.__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
