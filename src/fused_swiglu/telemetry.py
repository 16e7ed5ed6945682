"""Power, clock and temperature of a GPU over a window, read through NVML in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

import torch


@dataclass(slots=True)
class Telemetry:
    """Samples of one window; empty where NVML cannot be reached. reasons: NVML's bits for what holds the clock down."""

    sm_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    temperature_c: list[float] = field(default_factory=list)
    reasons: set[int] = field(default_factory=set)

    @classmethod
    def joined(cls, windows: Iterable[Telemetry]) -> Telemetry:
        """The samples of all windows."""
        total = cls()
        for window in windows:
            total.sm_mhz += window.sm_mhz
            total.power_w += window.power_w
            total.temperature_c += window.temperature_c
            total.reasons |= window.reasons
        return total

    @property
    def mean_sm_mhz(self) -> float | None:
        return fmean(self.sm_mhz) if self.sm_mhz else None

    @property
    def mean_power_w(self) -> float | None:
        return fmean(self.power_w) if self.power_w else None

    @property
    def mean_temperature_c(self) -> float | None:
        return fmean(self.temperature_c) if self.temperature_c else None

    @property
    def throttled(self) -> str | None:
        """What held the clock down at some time: `power`, `thermal`, `hardware`, joined by `+`; `no` for nothing; None
        where it was not read."""
        if not self.reasons:
            return None
        import pynvml

        limits = {
            "power": pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
            "thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            "hardware": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        }
        seen = [name for name, bits in limits.items() if any(reason & bits for reason in self.reasons)]
        return "+".join(seen) or "no"


class Sampler:
    """Context manager: `with Sampler(device) as telemetry:` fills `telemetry` every `interval_s` seconds."""

    def __init__(self, device: torch.device, interval_s: float = 0.05) -> None:
        self._device = device
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._telemetry = Telemetry()

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self._telemetry

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(self._device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            while not self._stop.is_set():
                self._telemetry.sm_mhz.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
                self._telemetry.power_w.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
                self._telemetry.temperature_c.append(
                    pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
                )
                self._telemetry.reasons.add(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
                time.sleep(self._interval_s)
        except Exception:
            # No NVML, or one that lacks a reading: the fields stay absent rather than guessed.
            return
