"""The keys of a GGUF file's architecture, each read with its type and its range."""

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import CheckpointError
from resin.models.loading.gguf_header import GgufHeader
from resin.plan.errors import shorten


class Metadata(ConfigReader):
    """The keys of one architecture, read without its name in front."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))
        prefix = f"{self.architecture}."
        own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        super().__init__(own, fault=self._fault_of, path=prefix)

    def _fault_of(self, key: str, value: object, expected: str) -> CheckpointError:
        shown = "is missing" if value is None else f"is {shorten(value)}"
        return CheckpointError(self.header.location, f"metadata {key} {shown}, expected {expected}")

    def per_layer(self, key: str, layers: int) -> tuple[int, ...]:
        """One number a layer, whether stored once or as a list."""
        if not isinstance(self.get(key), list):
            return (self.integer(key, low=0),) * layers
        values = self.integers(key) or ()
        if len(values) != layers:
            self.refuse(key, list(values), f"one whole number for each of block_count={layers} layers")
        return values

    def same(self, key: str, layers: int) -> int:
        """The number that every layer has."""
        values = set(self.per_layer(key, layers))
        if len(values) != 1 or 0 in values:
            self.refuse(key, self[key], "one whole number above 0, the same for every layer")
        return values.pop()
