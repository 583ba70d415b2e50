"""`python launch.py --config demo`: reads a recipe, checks it, and starts one rank per GPU through torch elastic.

The same file is what torch elastic (and torchrun, over many nodes) starts as a rank.
"""

import argparse
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import sys
import traceback
import uuid
from pathlib import Path

from rich.console import Console

from settings import ConfigError, dump, find_recipe, help_table, load, recipes

_PR_SET_PDEATHSIG = 1
RECIPES = Path(__file__).resolve().parent / "configs"


def main(arguments: list[str]) -> int:
    """Exit status: 0 done, 1 the run failed, 2 the command line or the config is wrong."""
    options = parse(arguments)
    if options.list:
        for name, line in recipes(RECIPES):
            print(f"{name:18} {line}")
        return 0
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars would break up ours
    # CPU threads that spin while they wait for each other stop a busy machine: 12 times slower beside another job.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The engine unmaps its memory between rollouts (torch_memory_saver): NCCL must not map or register buffers its way.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    from config import Config  # after --list, since it imports torch

    if options.help:
        parser().print_help()
        print("\nConfig fields (YAML, or section.key=value on the command line):\n")
        Console().print(help_table(Config))
        return 0
    try:
        if not options.config:
            raise ConfigError("--config NAME_OR_PATH is missing; --list shows the recipes")
        config = load(Config, find_recipe(options.config, RECIPES), options.overrides)
        if options.print_config:
            print(dump(config), end="")
            return 0
        return _rank(config, options) if "RANK" in os.environ else _launch(config, options, arguments)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="launch.py", add_help=False, description="Reinforcement learning with FP8 weights swapped into SGLang."
    )
    result.add_argument("--config", metavar="NAME_OR_PATH", help="a recipe of configs/, or a YAML file")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a field of the recipe")
    result.add_argument("--run-dir", type=Path, help="where results go (default: a new runs/NAME)")
    result.add_argument("--resume", action="store_true", help="continue from the last checkpoint of the run directory")
    result.add_argument(
        "--probe",
        action="store_true",
        help="measure where the trainer/rollout mismatch comes from, on one batch at the start or, with --resume, at "
        "the last checkpoint; nothing is trained",
    )
    result.add_argument("--list", action="store_true", help="list the recipes")
    result.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    result.add_argument("-h", "--help", action="store_true", help="show this and every config field")
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    """Overrides may stand anywhere between options."""
    return parser().parse_intermixed_args(arguments)


def _launch(config, options: argparse.Namespace, arguments: list[str]) -> int:
    """Checks what can be checked without starting anything, then starts the ranks and waits for them."""
    from engine.tasks import load_task
    from loop import has_run
    from trainer.fp8 import backend_name

    try:
        ranks = config.cluster.resolved_ranks()
        config.check_ranks(ranks)
        backend_name(config.fp8.train, config.cluster.resolved_device())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        load_task(config.task, config.seed)
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None
    run_dir = options.run_dir or _run_dir(config.name, options.resume)
    if options.resume and not run_dir.is_dir():
        raise ConfigError(f"--resume: there is no run in {run_dir}")
    if not options.resume and has_run(run_dir):
        raise ConfigError(f"--run-dir: {run_dir} holds a run already; continue it with --resume, or choose another")

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks say themselves what is wrong
    spec = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    rest = [*arguments, "--run-dir", str(run_dir)] if not options.run_dir else arguments
    try:
        elastic_launch(spec, sys.executable)("-u", str(Path(__file__).resolve()), *rest)
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        print(f"rank {first.local_rank} failed with exit status {first.exitcode}; results so far: {run_dir}",
              file=sys.stderr)  # fmt: skip
        return first.exitcode if first.exitcode in (1, 2) else 1
    except (KeyboardInterrupt, SignalException) as error:
        print(f"stopped by a signal; --resume --run-dir {run_dir} goes on from the last checkpoint", file=sys.stderr)
        return 128 + int(getattr(error, "sigval", 2))
    return 0


def _run_dir(name: str, resume: bool) -> Path:
    """A new runs/NAME, runs/NAME-2, …; with `resume` the newest that exists."""
    last = Path("runs") / name
    for n in itertools.count(2):
        if not resume:
            with contextlib.suppress(FileExistsError):
                last.mkdir(parents=True)  # claims it: another run may be starting now
                return last
        following = Path("runs") / f"{name}-{n}"
        if resume and not following.exists():
            return last
        last = following
    raise AssertionError


def _rank(config, options: argparse.Namespace) -> int:
    """One rank. Never returns on failure: other ranks may be gone, so nothing that waits for them may run."""
    from loop import USER_ERRORS, describe, run
    from ranks import Ranks
    from records.console import RunConsole

    ranks = Ranks(config.cluster)
    console = RunConsole(active=ranks.first)
    run_dir = ranks.share((options.run_dir or _run_dir(config.name, options.resume)) if ranks.first else None)
    run_dir.mkdir(parents=True, exist_ok=True)
    _end_in_order()
    try:
        run(config, run_dir, ranks, console, resume=options.resume, probe=options.probe)
    except USER_ERRORS as error:
        print(f"error: {describe(error)}", file=sys.stderr, flush=True)
    except Exception:  # a bug: the traceback is the message
        traceback.print_exc()
    except SystemExit:
        print("stopped by a signal", file=sys.stderr, flush=True)
    else:
        return 0
    os._exit(1)


def _end_in_order() -> None:
    """A SIGTERM (torch elastic passes Ctrl-C on as one), or the end of the launcher, unwinds this rank: it closes its
    engine and writes the report."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
