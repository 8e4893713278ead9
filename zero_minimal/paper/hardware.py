"""Hardware: a GPU's memory, operations and link rates, from its data sheet. Times computed from them are lower bounds.

Memory is decimal, as in the paper: a V100-32GB counts as 32·10⁹ bytes (it has 32 GiB, 7% more, of which the driver and
the context of CUDA take a part). A link's rate is for one direction, since a ring sends and receives at once: a V100
has 6 NVLinks of 25 GB/s each way. (The paper's "300 GB/s" inside a node counts both directions; its 12.5 GB/s between
nodes counts one.)

PCIe links a GPU and its host: 16 lanes of version 3, 4 or 5 carry 16, 32 or 64 GB/s each way, and a copy reaches about
80% of that. A DGX-2 has PCIe 3.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """memory in bytes; operations a second on dense matrices; bytes a second to a neighbour, one direction."""

    memory: float
    operations: float  # in 16 bit, on tensor cores
    operations_fp32: float  # not on tensor cores: torch uses TF32 only when asked to
    link: float
    node: int = 8  # GPUs of a typical node, which the link connects
    bus: float = 32e9  # to its host, one direction; default: PCIe 4
    source: str = ""  # the data sheet; we use its figures without sparsity

    def rate(self, dtype: str) -> float:
        """Operations a second in "fp32", "bf16" or "fp16"."""
        return self.operations_fp32 if dtype == "fp32" else self.operations


GPUS = {
    "T4": GPU(16e9, 65e12, 8.1e12, 16e9, bus=16e9, source="NVIDIA T4 Tensor Core GPU data sheet"),  # PCIe 3
    # NVLink from here on, unless a comment says otherwise
    "V100-16GB": GPU(16e9, 125e12, 15.7e12, 150e9, bus=16e9, source="NVIDIA V100 Tensor Core GPU data sheet, SXM2"),
    "V100-32GB": GPU(32e9, 125e12, 15.7e12, 150e9, node=16, bus=16e9,  # the paper's, in a DGX-2
                     source="NVIDIA V100 Tensor Core GPU data sheet, SXM2; NVIDIA DGX-2 data sheet"),
    "RTX-4090": GPU(24e9, 165e12, 82.6e12, 32e9, source="NVIDIA Ada GPU Architecture white paper, appendix A"),
    "L40S": GPU(48e9, 362e12, 91.6e12, 32e9, source="NVIDIA L40S data sheet"),  # PCIe 4, like the one before
    "A100-40GB": GPU(40e9, 312e12, 19.5e12, 300e9, source="NVIDIA A100 Tensor Core GPU data sheet, SXM"),
    "A100-80GB": GPU(80e9, 312e12, 19.5e12, 300e9, source="NVIDIA A100 Tensor Core GPU data sheet, SXM"),
    "H100-80GB": GPU(80e9, 989e12, 67e12, 450e9, bus=64e9, source="NVIDIA H100 Tensor Core GPU data sheet, SXM"),
    "H200": GPU(141e9, 989e12, 67e12, 450e9, bus=64e9, source="NVIDIA H200 Tensor Core GPU data sheet, SXM"),
}
NETWORK = 12.5e9  # bytes a second between nodes: 100 Gbit/s, as in the paper's cluster
