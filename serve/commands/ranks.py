"""Several processes that serve one model: rank 0 listens, the others run what it runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from resin.models.registry import open_checkpoint, resolve
from resin.plan import ResinError
from resin.topology import Launch, Topology
from serve.commands.options import runner_options
from serve.progress import ProgressBar

if TYPE_CHECKING:
    from resin.runtime.worker import Ranks


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `launch_of` reads."""
    group = parser.add_argument_group("processes", "torchrun, Slurm and Kubernetes tell these by their environment")
    group.add_argument("--nodes", type=int, metavar="N", help="processes that run the model together; default 1")
    group.add_argument("--node-rank", type=int, metavar="R", help="of this one; 0 plans and serves; default 0")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where they meet: an address of rank 0, of which this port and the next are taken; default: none",
    )


def launch_of(args: argparse.Namespace) -> Launch:
    """What the arguments and the environment say.

    Raises:
        InvalidRequest: they do not fit together.
    """
    return Launch.detect(nodes=args.nodes, node_rank=args.node_rank, coordinator=args.coordinator)


def lead(args: argparse.Namespace, launch: Launch) -> Ranks:
    """Gathers the other ranks and joins the devices of all.

    Raises:
        ResinError: whatever the user can put right.
    """
    from resin.runtime.worker import Ranks

    topology = _topology(args, launch)
    ranks = Ranks(launch, _digest(args, launch))
    with ProgressBar("gathering") as bar:
        ranks.gather()
        bar.close(str(launch))
    _join(topology)
    return ranks


def work(args: argparse.Namespace, launch: Launch) -> int:
    """Runs what rank 0 runs, until that ends. A signal that a launcher sends to all is for rank 0 to answer."""
    from resin.runtime import load_runner
    from resin.runtime.worker import Worker

    topology = _topology(args, launch)
    digest = _digest(args, launch)
    with ProgressBar("joining") as bar:
        worker = Worker(launch, digest)
        bar.close(str(launch))
    worker.on_lost = leave
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        _join(topology)
        runner = load_runner(args.source, runner_options(args), model=args.model)
        worker.follow(runner)
    except Exception as error:
        leave(error)
    return 0


def leave(error: BaseException) -> None:
    """Ends the process now: an orderly end would wait for ranks that are gone."""
    print(f"resin: {error}", file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(1)


def _topology(args: argparse.Namespace, launch: Launch) -> Topology:
    return Topology(runner_options(args).mesh, launch)


def _digest(args: argparse.Namespace, launch: Launch) -> str:
    """Of what all ranks must have in common; where programs are kept is a machine's own."""
    from resin.runtime.worker import digest_of

    with ProgressBar("fetching") as bar:
        files = resolve(args.source).fetch(bar.update)
    checkpoint = open_checkpoint(files)
    try:
        config = json.dumps(checkpoint.config, sort_keys=True, default=str)
    finally:
        checkpoint.close()
    options = replace(runner_options(args), compile_cache=None, compile_cache_bytes=0, compile_threads=None)
    return digest_of(options, args.model, config, launch.processes)


def _join(topology: Topology) -> None:
    """Makes the devices of all processes known to JAX, each of which drives its share."""
    import jax

    launch, count = topology.launch, topology.devices_per_process
    jax.config.update("jax_num_cpu_devices", count)
    mine = None
    if (launch.local_processes or 1) > 1:
        mine = list(range(launch.local_rank * count, (launch.local_rank + 1) * count))
    try:
        jax.distributed.initialize(launch.coordinator, launch.processes, launch.rank, local_device_ids=mine)
    except RuntimeError as error:
        raise ResinError(f"the processes cannot meet at {launch.coordinator}: {error}") from error
