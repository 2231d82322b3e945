"""A model's weights as a flat tuple of arrays: checked, loaded or made up, all from the declarations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resin.models.declare import Declaration, Init, Weight
from resin.models.loading.checkpoint import Checkpoint, CheckpointError

Progress = Callable[[str, int, int | None], None]
"""Called with (what, done, total) while something long runs; bytes while weights load."""


@dataclass(frozen=True, slots=True)
class AbstractModel:
    """A model without values: its structure and its declarations, in the order of the flat weight tuple."""

    graphdef: Any
    names: tuple[str, ...]
    declarations: tuple[Declaration, ...]
    ignored_tensors: tuple[str, ...]

    @staticmethod
    def of(model: nnx.Module) -> AbstractModel:
        """Takes a freshly built model apart.

        Raises:
            TypeError: a parameter was not made by `declare`.
        """
        graphdef, state = nnx.split(model)
        names: list[str] = []
        declarations: list[Declaration] = []
        for path, variable in nnx.to_flat_state(state):
            name = ".".join(str(part) for part in path)
            if not isinstance(variable, Weight):
                raise TypeError(
                    f"{type(model).__name__}.{name} is a {type(variable).__name__}: use resin.models.declare"
                )
            names.append(name)
            declarations.append(variable.declaration)
        return AbstractModel(graphdef, tuple(names), tuple(declarations), tuple(getattr(model, "ignored_tensors", ())))

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """The model with these values; inside a mapped function they are the device's own shares."""
        return nnx.merge(self.graphdef, list(arrays))

    def specs(self) -> tuple[PartitionSpec, ...]:
        """How each weight is cut over the mesh."""
        return tuple(PartitionSpec(*declaration.partition) for declaration in self.declarations)

    def arguments(self, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes with shardings, for compiling before the values exist."""
        return tuple(
            jax.ShapeDtypeStruct(declaration.shape, declaration.dtype, sharding=NamedSharding(mesh, spec))
            for declaration, spec in zip(self.declarations, self.specs(), strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, a cut weight counted once."""
        return sum(declaration.nbytes for declaration in self.declarations)

    def device_nbytes(self, mesh: Mesh) -> int:
        """Bytes that one device of the mesh holds."""
        return sum(
            declaration.nbytes // int(np.prod([mesh.shape[axis] for axis in declaration.partition if axis], initial=1))
            for declaration in self.declarations
        )

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds times two of all products with weights, attention scores not counted."""
        return sum(declaration.flops_per_token for declaration in self.declarations)


def check_tensors(model: AbstractModel, checkpoint: Checkpoint) -> None:
    """Holds the declarations against the checkpoint's index.

    Raises:
        CheckpointError: names every missing, extra and misshapen tensor at once.
    """
    held = {name: info.shape for name, info in (*checkpoint.tensors.items(), *checkpoint.quantised.items())}
    faults: list[str] = []
    used: set[str] = set()
    for declaration in model.declarations:
        shapes = declaration.assembly.source_shapes(declaration.shape)
        for name, shape in zip(declaration.sources, shapes, strict=True):
            used.add(name)
            if name not in held:
                faults.append(f"missing {name} {list(shape)}")
            elif tuple(held[name]) != shape:
                faults.append(f"misshapen {name} {list(held[name])}, expected {list(shape)}")
    packed = tuple(name.removesuffix(".weight") for name in used if name in checkpoint.quantised)
    faults += [
        f"extra {name} {list(checkpoint.tensors[name].shape)}"
        for name in sorted(set(checkpoint.tensors) - used)
        if not name.endswith(model.ignored_tensors) and not name.startswith(packed)
    ]
    if faults:
        raise CheckpointError(checkpoint.location, f"{len(faults)} tensors do not fit the model: " + "; ".join(faults))


def load_weights(
    model: AbstractModel, checkpoint: Checkpoint, mesh: Mesh, *, progress: Progress | None = None, threads: int = 4
) -> tuple[jax.Array, ...]:
    """Reads every weight straight to its devices; the host holds at most one weight a thread.

    Args:
        model: the declarations.
        checkpoint: where the tensors are.
        mesh: where they go.
        progress: called after each weight with its name, bytes done and bytes in all.
        threads: parallel reads.

    Raises:
        CheckpointError: tensors do not fit (all named at once) or cannot be read.
    """
    check_tensors(model, checkpoint)
    load = partial(_load_weight, checkpoint, mesh)
    arrays: list[jax.Array | None] = [None] * len(model.declarations)
    done = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="resin-load") as pool:
        futures = {pool.submit(load, item): index for index, item in enumerate(model.declarations)}
        try:
            for future in as_completed(futures):
                index = futures[future]
                arrays[index] = future.result()
                done += model.declarations[index].nbytes
                if progress is not None:
                    progress(model.names[index], done, model.nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return tuple(array for array in arrays if array is not None)


def _load_weight(checkpoint: Checkpoint, mesh: Mesh, declaration: Declaration) -> jax.Array:
    # A fresh array even where nothing changes: device_put on CPU may alias it, and the mapped file can go away.
    host = np.empty(declaration.shape, jax.dtypes.canonicalize_dtype(declaration.dtype))
    declaration.assembly.fill(host, _Tensors(checkpoint, declaration.sources))
    placed = jax.device_put(host, NamedSharding(mesh, PartitionSpec(*declaration.partition)))
    return placed.block_until_ready()


class _Tensors(Sequence[np.ndarray]):
    """Checkpoint tensors that are read when an assembly asks for them, so that decoded ones do not pile up."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        self._checkpoint = checkpoint
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Tensors(self._checkpoint, self._names[index])
        name = self._names[index]
        if name in self._checkpoint.quantised:
            return self._checkpoint.read_dequantised(name)
        return self._checkpoint.read(name)


def dummy_weights(
    model: AbstractModel, mesh: Mesh, *, seed: int = 0, progress: Progress | None = None
) -> tuple[jax.Array, ...]:
    """Random weights of the declared distributions, made on the devices; copies of KV heads are not kept equal."""
    arrays: list[jax.Array] = []
    done = 0
    key = jax.random.key(seed)
    for index, declaration in enumerate(model.declarations):
        sharding = NamedSharding(mesh, PartitionSpec(*declaration.partition))
        draw = jax.jit(_normal, static_argnums=(1, 2, 3), out_shardings=sharding)
        arrays.append(draw(jax.random.fold_in(key, index), declaration.shape, declaration.dtype, declaration.init))
        done += declaration.nbytes
        if progress is not None:
            progress(model.names[index], done, model.nbytes)
    return tuple(arrays)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str, init: Init) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        values = jnp.round(init.mean + init.std * jax.random.normal(key, shape, jnp.float32))
        return jnp.clip(values, limits.min, limits.max).astype(dtype)
    return init.mean + init.std * jax.random.normal(key, shape, jnp.dtype(dtype))
