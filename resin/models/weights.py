"""A model's weights as a flat tuple of arrays: checked, loaded or made up, all from the declarations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from resin.models.assemblies import Shape, Tensor, window_shape
from resin.models.declare import ByteInit, Declaration, Init, Weight
from resin.models.loading.checkpoint import Checkpoint, PackedInfo, TensorInfo, Window, refuse_misfits
from resin.models.workers import worker_pool

Progress = Callable[[str, int, int | None], None]
"""Called with (what, done, total) while something long runs; bytes while weights load."""


_PLAIN_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class AbstractModel:
    """A model without values: its structure and its declarations, in the order of the flat weight tuple.

    Attributes:
        graphdef: the structure.
        names: paths of the weights.
        declarations: one a weight.
        ignored_tensors: checkpoint names, whole, their last parts, or first parts with a dot at the end, that need no
            home.
        other_names: names under which a tensor may be stored instead of its own.
    """

    graphdef: Any
    names: tuple[str, ...]
    declarations: tuple[Declaration, ...]
    ignored_tensors: tuple[str, ...]
    other_names: Mapping[str, str]

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
        ignored, others = getattr(model, "ignored_tensors", ()), getattr(model, "other_names", {})
        return AbstractModel(graphdef, tuple(names), tuple(declarations), tuple(ignored), dict(others))

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """The model with these values; inside a mapped function they are the device's own shares."""
        return nnx.merge(self.graphdef, list(arrays))

    def specs(self, mesh: Mesh) -> tuple[PartitionSpec, ...]:
        """How each weight is cut over the mesh."""
        return tuple(declaration.spec(mesh) for declaration in self.declarations)

    def arguments(self, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes with shardings, for compiling before the values exist."""
        return tuple(
            jax.ShapeDtypeStruct(item.placed_shape(mesh), item.dtype, sharding=item.sharding(mesh))
            for item in self.declarations
        )

    def without_copies(self, mesh: Mesh) -> AbstractModel:
        """The same weights in their own shapes, whole on every device where the mesh does not divide them."""
        return replace(self, declarations=tuple(item.without_copies(mesh) for item in self.declarations))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, whatever the mesh."""
        return sum(declaration.nbytes for declaration in self.declarations)

    def device_nbytes(self, mesh: Mesh) -> int:
        """Bytes that one device of the mesh holds."""
        return sum(declaration.device_nbytes(mesh) for declaration in self.declarations)

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds times two of all products with weights, attention scores not counted."""
        return sum(declaration.flops_per_token for declaration in self.declarations)


def check_tensors(model: AbstractModel, checkpoint: Checkpoint) -> None:
    """Holds the declarations against the checkpoint's index: names, shapes and dtypes.

    Raises:
        CheckpointError: says how many tensors do not fit, and names the first of them.
    """
    held: dict[str, TensorInfo | PackedInfo] = {**checkpoint.tensors, **checkpoint.quantised}
    missing, unfit, used = [], [], set[str]()
    for declaration in model.declarations:
        shapes = declaration.assembly.source_shapes(declaration.shape)
        for name, shape in zip(declaration.sources, shapes, strict=True):
            stored = _stored_name(model, checkpoint, name)
            used.add(stored)
            if stored not in held:
                missing.append(f"missing {stored} {list(shape)}")
            elif fault := _fault_of(stored, held[stored], shape, declaration.stored_dtype):
                unfit.append(fault)
    for name in checkpoint.quantised:
        if name in used:
            used.update(checkpoint.quantised[name].parts)
    extra = [
        f"extra {name} {list(checkpoint.tensors[name].shape)}"
        for name in sorted(set(checkpoint.tensors) - used)
        if not any(_is_ignored(name, ignored) for ignored in model.ignored_tensors)
        and not _adds_nothing(checkpoint, name)
    ]
    refuse_misfits(checkpoint.location, "tensors", missing, extra, unfit)


def _adds_nothing(checkpoint: Checkpoint, name: str) -> bool:
    """Whether it is a bias of zeros beside a packed matrix: some packers write one for every matrix."""
    is_bias = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in checkpoint.quantised
    return is_bias and not checkpoint.read(name).any()


def _is_ignored(name: str, ignored: str) -> bool:
    return name.startswith(ignored) if ignored.endswith(".") else f".{name}".endswith(f".{ignored}")


def _stored_name(model: AbstractModel, checkpoint: Checkpoint, name: str) -> str:
    other = model.other_names.get(name)
    if other is None or name in checkpoint.tensors or other not in checkpoint.tensors:
        return name
    return other


def _fault_of(name: str, info: TensorInfo | PackedInfo, shape: tuple[int, ...], dtype: str | None) -> str | None:
    """What is wrong with a stored (or decoded) tensor that is to have a shape and a dtype, or any float."""
    if tuple(info.shape) != shape:
        return f"misshapen {name} {list(info.shape)}, expected {list(shape)}"
    # Packed values are only what they are; numbers are read from floats that need no scale.
    allowed = _PLAIN_FLOATS if dtype is None else (dtype,)
    if info.dtype in allowed:
        return None
    reason = " (a scale for it is not stored)" if info.dtype.startswith("float8") else ""
    return f"{info.dtype} in {name}{reason}, expected {' or '.join(allowed)}"


def load_weights(
    model: AbstractModel, checkpoint: Checkpoint, mesh: Mesh, *, progress: Progress | None = None, threads: int = 4
) -> tuple[jax.Array, ...]:
    """Reads every weight straight to its devices, and of it what this process's devices hold.

    The host holds at most one weight a thread.

    Args:
        model: the declarations.
        checkpoint: where the tensors are.
        mesh: where they go.
        progress: called after each weight with its name, bytes done and bytes in all.
        threads: parallel reads.

    Raises:
        CheckpointError: tensors do not fit or cannot be read.
    """
    check_tensors(model, checkpoint)
    load = partial(_load_weight, model, checkpoint, mesh)
    arrays: list[jax.Array | None] = [None] * len(model.declarations)
    done = 0
    with worker_pool(threads, "resin-load") as pool:
        futures = {pool.submit(load, item): index for index, item in enumerate(model.declarations)}
        for future in as_completed(futures):
            index = futures[future]
            arrays[index] = future.result()
            done += model.declarations[index].nbytes
            if progress is not None:
                progress(model.names[index], done, model.nbytes)
    return tuple(array for array in arrays if array is not None)


def _load_weight(model: AbstractModel, checkpoint: Checkpoint, mesh: Mesh, declaration: Declaration) -> jax.Array:
    names = [_stored_name(model, checkpoint, name) for name in declaration.sources]
    return place_weight(declaration, [StoredTensor(checkpoint, name) for name in names], mesh)


def place_weight(declaration: Declaration, tensors: Sequence[Tensor], mesh: Mesh) -> jax.Array:
    """The weight on the mesh's devices, each share made of the tensors behind it and no others."""
    shape = declaration.placed_shape(mesh)
    shares: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # devices may hold the same

    def share(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        if bounds not in shares:
            window = tuple(slice(*bound) for bound in bounds)
            shares[bounds] = read_share(declaration, tensors, shape, window)
        return shares[bounds]

    return jax.make_array_from_callback(shape, declaration.sharding(mesh), share).block_until_ready()


def read_share(declaration: Declaration, tensors: Sequence[Tensor], placed_shape: Shape, window: Window) -> np.ndarray:
    """A window of a weight as it lies on a mesh, from the checkpoint's tensors."""
    # A fresh array even where nothing changes: devices may alias it, and the mapped file can go away.
    out = np.empty(window_shape(window), jax.dtypes.canonicalize_dtype(declaration.dtype))
    for piece in declaration.pieces(placed_shape, window):
        declaration.assembly.fill(out[piece.share], tensors, piece.weight)
    return out


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checkpoint tensor that is read, and decoded, when and where an assembly asks for it."""

    checkpoint: Checkpoint
    name: str

    def __getitem__(self, window: Any, /) -> np.ndarray:
        window = window if isinstance(window, tuple) else (window,)
        if self.name in self.checkpoint.quantised:
            return self.checkpoint.read_dequantised(self.name, window)
        return self.checkpoint.read(self.name, window)


def dummy_weights(
    model: AbstractModel, mesh: Mesh, *, seed: int = 0, progress: Progress | None = None
) -> tuple[jax.Array, ...]:
    """Random weights of the declared distributions, made on the devices; copies of KV heads are not kept equal."""
    arrays: list[jax.Array] = []
    done = 0
    key = jax.random.key(seed)
    for index, declaration in enumerate(model.declarations):
        draw = jax.jit(_normal, static_argnums=(1, 2, 3), out_shardings=declaration.sharding(mesh))
        shape = declaration.placed_shape(mesh)
        arrays.append(draw(jax.random.fold_in(key, index), shape, declaration.dtype, declaration.init))
        done += declaration.nbytes
        if progress is not None:
            progress(model.names[index], done, model.nbytes)
    return tuple(arrays)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str, init: Init) -> jax.Array:
    if isinstance(init, ByteInit):
        return _random_bytes(key, shape, dtype, init)
    return init.mean + init.std * jax.random.normal(key, shape, jnp.dtype(dtype))


def _random_bytes(key: jax.Array, shape: tuple[int, ...], dtype: str, init: ByteInit) -> jax.Array:
    """Byte by byte, as a float32 for each would take eight times the weight's memory."""
    total = jnp.zeros(shape, dtype)
    for index in range(jnp.dtype(dtype).itemsize):
        values = init.mean + init.std * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.bfloat16)
        total = total | (jnp.clip(jnp.round(values), 0, 255).astype(dtype) << (8 * index))
    return total
