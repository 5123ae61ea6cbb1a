"""What GPUs can do, by their vendors' data sheets."""

from typing import NamedTuple

from shared.models.counts import PEAK_FLOPS, known_gpu
from shared.process.errors import ConfigError


class GPU(NamedTuple):
    """One GPU."""

    flops: float  # a second, of shared.models.counts.PEAK_FLOPS
    bandwidth: float  # bytes a second
    fp8: float  # times `flops`; 0: it has none


# Bandwidth, and how much faster fp8 is.
SHEETS = {
    "GB200": (8e12, 2),
    "B200": (8e12, 2),
    "GH200": (4e12, 2),
    "H200 NVL": (4.8e12, 2),
    "H200": (4.8e12, 2),
    "H100 PCIe": (2e12, 2),
    "H100 NVL": (3.9e12, 2),
    "H100": (3.35e12, 2),
    "A100-SXM4-40GB": (1.555e12, 0),
    "A100-PCIE-40GB": (1.555e12, 0),
    "A100 80GB PCIe": (1.935e12, 0),
    "A100": (2.039e12, 0),
    "L40S": (0.864e12, 2),
    "L40": (0.864e12, 2),
    "L4": (0.3e12, 2),
    "A10G": (0.6e12, 0),
    "A10": (0.6e12, 0),
    "RTX 4090": (1.008e12, 2),
    "RTX 3090": (0.936e12, 0),
    "V100": (0.9e12, 0),
    "T4": (0.32e12, 0),
    "MI300X": (5.3e12, 2),
}


def find_gpu(name: str) -> GPU:
    """The GPU with this name, as `torch.cuda.get_device_name` prints it or shorter.

    Raises:
        ConfigError: there is none in the table.
    """
    known = known_gpu(name)
    if known is None:
        raise ConfigError(f"--gpu {name}: known are {', '.join(SHEETS)}")
    return GPU(PEAK_FLOPS[known], *SHEETS[known])
