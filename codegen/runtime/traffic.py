"""Bytes that crossed the bus between the device and the host in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Bytes of this rank's current (or last) step. out: device to host, in: host to device.

    activations: saved tensors. gradients_out, masters_in: the update on the host. parameters_in: shards brought to the
    device for gathers.
    """

    activations_out: int = 0
    activations_in: int = 0
    gradients_out: int = 0
    masters_in: int = 0
    parameters_in: int = 0

    @property
    def bytes_out(self) -> int:
        """Bytes that left the device."""
        return self.activations_out + self.gradients_out

    @property
    def bytes_in(self) -> int:
        """Bytes that came to the device."""
        return self.activations_in + self.masters_in + self.parameters_in

    def reset(self) -> None:
        """Sets all counts to 0, as a step begins."""
        for name in Traffic.__slots__:
            setattr(self, name, 0)
