"""Table 15 of Xia et al. (arXiv 2203.16487): the energy of decoding, by a GPU's own counter.

NVML, which comes with NVIDIA's driver, counts the energy that a GPU has taken. Where there is no
such GPU, the table has the times and says why it has nothing else.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from tables.decode import PLAIN
from tables.shared import Bench, Column, Result
from tables.xia import placed_drafter
from tables.xia_figures import RELAXED, VANILLA, decoded_batch

# As in the paper: the power usage effectiveness of a data centre, and grams of CO2 a watt hour.
USAGE_EFFECTIVENESS, CARBON = 1.1, 0.385
LIBRARY = "libnvidia-ml.so.1"

# Watts, hours, watt hours and grams of CO2, for 3,000 sentences of WMT14 English to German, P100.
TABLE_15 = {PLAIN: (86.0, 0.27, 25.54, 9.83), RELAXED: (110.0, 0.05, 6.05, 2.33)}
PAPER_KEYS = ("paper_power", "paper_hours", "paper_energy", "paper_carbon")


class NoMeterError(Exception):
    """Nothing here counts energy; the message says why."""


def open_meter(device: torch.device) -> Callable[[], float]:
    """Return what reads the joules that a device has taken since its driver was loaded.

    Raises
    ------
    NoMeterError
        The device is no GPU, NVML is missing, or the GPU keeps no count (before Volta).
    """
    if device.type != "cuda":
        raise NoMeterError(
            f"the models run on a {device.type.upper()}, and NVML counts GPUs' energy"
        )
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NoMeterError(f"{LIBRARY} cannot be loaded ({error})") from error
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()

    def called(name: str, *arguments: Any) -> None:
        if code := getattr(library, name)(*arguments):
            raise NoMeterError(f"{name} returned {code}")

    def joules() -> float:
        torch.cuda.synchronize(device)
        called("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    called("nvmlInit_v2")
    called("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid), ctypes.byref(handle))
    joules()
    return joules


def energy_of(joules: float, seconds: float) -> dict[str, float]:
    """Return watts, watt hours and grams of CO2 by the paper's formulas, E = P t PUE."""
    energy = joules / 3600 * USAGE_EFFECTIVENESS
    return {"power": joules / seconds, "energy": energy, "carbon": CARBON * energy}


@torch.inference_mode()
def make(bench: Bench) -> Result:
    """Make the table."""
    name, model = placed_drafter(bench)
    meter, missing = None, ""
    try:
        meter = open_meter(bench.device)
    except NoMeterError as error:
        missing = str(error)
    records: list[dict[str, Any]] = []
    ways = {PLAIN: (None, "greedy"), VANILLA: (model, "greedy"), RELAXED: (model, "top_beta")}
    for way, how in ways.items():
        decoded_batch(bench, bench.sentences[:1], *how)  # what happens once is not measured
        before = 0.0 if meter is None else meter()
        begin = time.perf_counter()
        for sentence in bench.sentences:
            decoded_batch(bench, [sentence], *how)
        taken = None if meter is None else meter() - before
        seconds = time.perf_counter() - begin
        record = {"way": way, "sentences": len(bench.sentences), "seconds": seconds}
        record |= {"missing": missing} if taken is None else energy_of(taken, seconds)
        record |= dict(zip(PAPER_KEYS, TABLE_15.get(way, ()), strict=False))
        records.append(record)
    notes = [
        "One sentence at a time, each way by itself and not by turns. As in the paper the energy "
        f"is E = P t PUE, PUE {USAGE_EFFECTIVENESS}, and {CARBON} g of CO2 a watt hour; P is "
        "NVML's count of the GPU alone over t.",
        "The paper's figures: 3,000 sentences of WMT14 English to German, P100.",
    ]
    if missing:
        notes.insert(0, f"The energy is missing: {missing}. Only the times were measured.")
    return Result(
        f"Energy (Xia et al., Table 15): {bench.task}, target {bench.target_name}, drafter {name}, "
        f"{bench.device.type}",
        [
            Column("way", "decoding"), Column("sentences", "sentences", "d"),
            Column("seconds", "seconds", ".1f"), Column("power", "P, W", ".0f"),
            Column("energy", "E, Wh", ".3f"), Column("carbon", "CO2, g", ".3f"),
            Column("paper_power", "paper: P, W", ".0f"), Column("paper_hours", "hours"),
            Column("paper_energy", "E, Wh"), Column("paper_carbon", "CO2, g"),
        ],
        records, notes, draw=lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw bars of energy, or of time where energy is missing."""
    key, label = ("seconds", "seconds") if "missing" in records[0] else ("energy", "watt hours")
    figure, axes = pyplot.subplots(figsize=(6, 3))
    axes.barh([record["way"] for record in records], [record[key] for record in records])
    axes.set(xlabel=label)
    return figure
