"""Memory, speed and links of devices, as stated by their makers."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.errors import NameUnknown, did_you_mean

DEFAULT = "h100-80gb"
DEFAULT_UTILIZATION = 0.92
"""Share of a device's memory that vLLM uses if `gpu_memory_utilization` is not set."""
ENGINE_RESERVE_BYTES = 2 << 30
"""Assumed memory of each engine process, even while it sleeps: CUDA context, NCCL, captured graphs."""


@dataclass(frozen=True)
class Hardware:
    """One device of a machine with eight. Bandwidths are per device and direction."""

    name: str
    memory_bytes: int
    """Total that CUDA reports, slightly less than the nominal size."""
    flops_per_s: float
    """Dense bfloat16 rate."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bandwidth to another device of the machine (NVLink)."""
    network_bytes_per_s: float
    """Bandwidth to a device of another machine, with one network card per device."""
    host_bytes_per_s: float
    """Bandwidth to pinned host memory, with all devices of the machine copying at once."""


def _device(
    name: str, memory_gib: float, tflops: float, hbm_tb: float, nvlink_gb: float, network_gb: float
) -> Hardware:
    host = {"a100": 20e9}.get(name.partition("-")[0], 40e9)  # PCIe 4 and 5, less than a single device would get
    memory, flops, hbm = int(memory_gib * 2**30), tflops * 1e12, hbm_tb * 1e12
    return Hardware(name, memory, flops, hbm, nvlink_gb * 1e9, network_gb * 1e9, host)


HARDWARE = {
    device.name: device
    for device in (
        _device("a100-40gb", 39.4, 312, 1.56, 300, 25),
        _device("a100-80gb", 79.2, 312, 2.04, 300, 25),
        _device("h20-96gb", 95.2, 148, 4.0, 450, 50),
        _device("h100-80gb", 79.1, 989, 3.35, 450, 50),
        _device("h200-141gb", 139.8, 989, 4.8, 450, 50),
        _device("b200-180gb", 178.3, 2250, 8.0, 900, 50),
        _device("gb200-186gb", 184.0, 2450, 8.0, 900, 50),
    )
}


def device_flops_per_s(device: str) -> float | None:
    """Return the dense bfloat16 rate of a device by its CUDA name (`NVIDIA H100 80GB HBM3`), or None if it is
    unknown."""
    words = device.lower().replace("-", " ").split()
    return next((known.flops_per_s for name, known in HARDWARE.items() if name.partition("-")[0] in words), None)


def hardware(name: str) -> Hardware:
    """Return the device with that name; `h100` selects its largest variant."""
    wanted = name.lower()
    matches = [device for known, device in HARDWARE.items() if wanted in (known, known.partition("-")[0])]
    if not matches:
        raise NameUnknown(f'--hardware: "{name}" is not known', fix=did_you_mean(wanted, HARDWARE))
    return max(matches, key=lambda device: device.memory_bytes)
