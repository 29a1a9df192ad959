"""Rates of a target, and the time that a matmul's arithmetic or a collective takes at them.

All of it is *modelled*: the data sheet's rates, scaled by efficiencies that `CostModel` states
and a reader may change. `jaxaccel.timeline` plays compiled schedules with it, and techniques
that have several forms choose among them with it.
"""

import dataclasses

from pallas_kernels.target import Target

# Bytes that cross a GPU's link in a ring, over those of the whole array, times n / (n - 1).
_RING_PASSES = {"all-reduce": 2}
_NEIGHBOUR = ("collective-permute", "collective-broadcast")  # the whole array crosses a link


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Rates that the model divides by, and what it assumes to be attained of them."""

    target: Target  # whose GPU's data-sheet figures are the rates
    matmul_efficiency: float = 0.7  # what large matmuls reach of the data sheet's dense rate
    memory_efficiency: float = 0.85  # what a long copy reaches of the memory bandwidth
    link_efficiency: float = 0.8  # what large ring collectives reach of the link
    collective_latency: float = 10e-6  # seconds, each
    kernel_latency: float = 2e-6  # seconds; no kernel is shorter

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of a matmul with these operands; float32 runs as TF32, JAX's default."""
        gpu = self.target.gpu
        rates = {"fp8": gpu.fp8_flops, "f32": gpu.tf32_flops}
        return (rates.get(dtype) or gpu.bf16_flops) * self.matmul_efficiency

    def collective_seconds(
        self, kind: str, whole_bytes: float | int, members: int, per_node: int | None = None
    ) -> float:
        """Time of one collective among `members` GPUs.

        A ring passes (n - 1) / n of the array over each link, an all-reduce twice that; a
        permutation or broadcast the whole of it.

        Args:
          kind: XLA's name of it, as in `hlo.COLLECTIVES`.
          whole_bytes: of the whole array: gathered, reduced or exchanged.
          members: GPUs that take part.
          per_node: most of them that share a node; by default they fill nodes one by one.

        Returns:
          Seconds, *modelled*; 0 for one member.

        Example:
          >>> from pallas_kernels.target import parse
          >>> model = CostModel(parse("h200x8"))
          >>> round(1e6 * model.collective_seconds("all-gather", 64 * 2**20, 8))  # microseconds
          173
        """
        if members == 1:
            return 0.0
        per_node = per_node or min(members, self.target.gpus_per_node)
        link = self.target.gpu.nvlink_bandwidth
        # A ring over several nodes enters and leaves each node once on every GPU's own adapter.
        if per_node < members:
            link = min(link, self.target.gpu.network_bandwidth * per_node)
        passes = _RING_PASSES.get(kind, 1) * (members - 1) / members
        wire = whole_bytes * (1.0 if kind in _NEIGHBOUR else passes)
        return wire / (link * self.link_efficiency) + self.collective_latency
