"""Which rows of a global batch a process reads, and how they come to its devices."""

import dataclasses
import functools

import jax
import numpy as np

from experiments.packing import Batch
from jaxaccel.train_step import BATCH_KEYS


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """The rows of a global batch that this process' devices need.

    Not a share for each process: where a mesh axis along which devices have the same rows
    (`tensor`, say) lies across processes, these processes need the same rows.
    """

    sharding: jax.sharding.Sharding  # of the global batch
    batch: int  # rows of it
    sequence: int  # tokens in a row

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """Their numbers in the global batch, ascending."""
        shape = (self.batch, self.sequence)
        places = self.sharding.addressable_devices_indices_map(shape).values()
        rows = [np.arange(self.batch)[place[0]] for place in places if place]
        return np.unique(np.concatenate(rows))

    def place(self, own: Batch) -> dict[str, jax.Array]:
        """The global batch, of which each process brings its rows.

        Args:
          own: the rows `numbers`, whole, as `experiments.data` reads them.
        """
        return {key: self._place(own[key]) for key in BATCH_KEYS}

    def _place(self, own: np.ndarray) -> jax.Array:
        if self.sharding.is_fully_addressable:
            return jax.device_put(own, self.sharding)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or (slice(None), slice(None))
            wanted = np.arange(self.batch)[index[0]]
            return own[(np.searchsorted(self.numbers, wanted), *index[1:])]

        return jax.make_array_from_callback((self.batch, self.sequence), self.sharding, part)
