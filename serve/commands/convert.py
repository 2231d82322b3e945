"""`resin convert`: saves weights as the model uses them: later starts, on any mesh, need no work on the host."""

from __future__ import annotations

import argparse
from pathlib import Path

from resin.models.registry import advised_sampling, open_checkpoint, resolve
from resin.models.sampling_defaults import read_sampling_defaults
from resin.recipes.tokenizer import load_tokenizer
from serve.progress import ProgressBar


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("convert", help="save a model for fast starts", description=__doc__)
    parser.add_argument("source", metavar="MODEL", help="registered name, directory, GGUF file or hub id")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where to; new or empty")
    parser.add_argument("--model", metavar="PACKAGE.MODULE:NAME", help="model class from outside this package")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--tp", type=int, metavar="N", default=1, help="devices that hold them meanwhile; default 1")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints where the result is."""
    with ProgressBar("fetching") as bar:
        files = resolve(args.source).fetch(bar.update)
        checkpoint = open_checkpoint(files)
    with ProgressBar("importing"):
        from resin.models.conversion import convert_checkpoint, copy_side_files
        from resin.runtime import RunnerOptions
        from resin.runtime.load import default_dtype
        from resin.runtime.mesh import build_mesh
    with ProgressBar("converting") as bar:
        try:
            mesh = build_mesh(RunnerOptions(tp=args.tp))
            dtype = args.dtype or default_dtype(mesh)
            directory = convert_checkpoint(
                checkpoint, args.directory, mesh, dtype=dtype, model=args.model, progress=bar.update
            )
        finally:
            checkpoint.close()
        if files.suffix == ".gguf":
            load_tokenizer(files).save(directory)
            read_sampling_defaults(files, advised_sampling(args.source)).save(directory)
        else:
            copy_side_files(files if files.is_dir() else files.parent, directory)
        bar.close(f"{directory}, {dtype}")
    print(directory)
    return 0
