"""GGUF files in parts, `NAME-00001-of-00003.gguf` and so on: the first has the metadata, each some of the tensors."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from resin.models.config_reader import some
from resin.models.loading.checkpoint import CheckpointError
from resin.models.loading.gguf_header import GgufHeader, parse_gguf_header
from resin.models.loading.mapped import map_file

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def open_parts(path: Path) -> tuple[list[np.ndarray], GgufHeader]:
    """Maps a file, or all parts of the one whose first part it is.

    Returns:
        The bytes of each part, and one header for all; a tensor's `part` says which holds it.

    Raises:
        CheckpointError: a part is missing, damaged or of another file.
    """
    paths = _find_parts(path)
    parts = [map_file(part) for part in paths]
    headers = [parse_gguf_header(data, str(part)) for data, part in zip(parts, paths, strict=True)]
    return parts, _join(headers)


def _find_parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    paths = [path.with_name(f"{stem}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    if not 1 <= number <= count:
        raise CheckpointError(path, f"there is no part {number} of {count}")
    if number != 1:
        raise CheckpointError(path, f"is part {number} of {count}: give the first, {stem}-00001-of-{count:05}.gguf")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(path, f"parts are missing: {some(missing)}")
    return paths


def _join(headers: Sequence[GgufHeader]) -> GgufHeader:
    first = headers[0]
    tensors = dict(first.tensors)
    for index, header in enumerate(headers):
        number, count = (header.metadata.get(f"split.{key}", default) for key, default in (("no", 0), ("count", 1)))
        if (number, count) != (index, len(headers)) and (count, len(headers)) != (0, 1):
            said, named = f"part number {number} of {count}", f"number {index} of {len(headers)}"
            raise CheckpointError(header.location, f"says that it is {said}, expected {named}, as its name has it")
        for name, tensor in header.tensors.items() if index else ():
            if name in tensors:
                raise CheckpointError(header.location, "is in another part as well", name)
            tensors[name] = replace(tensor, part=index)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(first.location, f"{len(tensors)} tensors are in all parts, expected {total}")
    return GgufHeader(first.location, first.metadata, tensors)
