"""A GPU on paper: regions at made-up addresses, and launches that are checked and recorded instead of run."""

from collections.abc import Iterable
from typing import Any

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region
from dsuf.cuda.sizes import from_config
from dsuf.cuda.table import KERNELS


class PaperArena(Arena):
    """Arrays that nothing stands behind; two regions never share an address."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions, self._arrays, self._pools = {}, {}, []
        at = 1 << 20
        for region in regions:
            assert region.name not in self.regions, f"two regions are called {region.name}"
            self.regions[region.name] = region
            self._arrays[region.name] = Array(at, region.kind, region.shape)
            at += region.reserved_bytes

    def host(self, name: str) -> Any:
        """Nobody reads it."""
        return None


class PaperKernels:
    """Checks every launch as a real one is checked, and remembers it."""

    def __init__(self, config: ModelConfig) -> None:
        self.names = from_config(config).named()
        self.launches: list[tuple[str, dict[str, Any]]] = []

    def launch(self, entry: str, stream: int = 0, **values: Any) -> None:
        """Pack and measure as `Kernels.launch` does."""
        kernel = KERNELS[entry]
        names = kernel.names(self.names)
        kernel.params.pack(values, names)
        names |= {name: value for name, value in values.items() if isinstance(value, int)}
        columns, rows = kernel.grid(names)
        assert columns >= 0 and 0 <= rows <= 65535
        self.launches.append((entry, values))
