"""What an instruction of PTX costs: the machine instructions that it becomes, and its latency.

The counts are the review's (see `machine`), read off SASS of sm_90 that nvcc made of such code:
counts of a scan's loop came within 4 % of the loop's own. Latencies of MUFU, of float64, of
conversions to it and of divisions were measured (latencies.cu). An instruction that costs nothing
is folded into its user, or disappears.
"""

from __future__ import annotations

from typing import NamedTuple

from .machine import Latencies
from .ptx import Instruction


class Cost(NamedTuple):
    """What one instruction takes."""

    issue: int  # machine instructions, a cycle each of the warp's scheduler
    latency: int  # cycles from then on until the result can be read


FREE = Cost(0, 0)
ALU = Cost(1, 5)
ALU_64 = Cost(2, 8)  # two instructions, the second one needs the first one's carry
LOGIC_64 = Cost(2, 5)
FP64 = Cost(1, 13)
MULTIPLY_64 = Cost(4, 14)
MULTIPLY_HIGH_64 = Cost(8, 30)
SPECIAL = Cost(1, 17)  # MUFU
CONVERT = Cost(1, 14)
CONVERT_64 = Cost(1, 18)

_DIVISIONS = {"f64": Cost(36, 170), "f32": Cost(20, 58), "u32": Cost(20, 129), "s32": Cost(20, 129)}
_DIVISION_64 = Cost(80, 400)
_APPROXIMATE_DIVISION = Cost(8, 40)
_RECIPROCAL = Cost(24, 120)
_SQUARE_ROOT = Cost(24, 120)
_WIDTHS = {"8": 8, "16": 16, "32": 32, "64": 64}
_LOGIC = {"and", "or", "xor", "not", "lop3"}


def _bits(kind: str) -> int:
    return next((bits for end, bits in _WIDTHS.items() if kind.endswith(end)), 1)


def cost(instruction: Instruction, latencies: Latencies) -> Cost:
    """Give the cost; the latency of what goes to memory is not known yet, and 0 here."""
    name, kind = instruction.opcode[0], instruction.type
    fixed = {
        "shfl": Cost(1, latencies.shuffle),
        "redux": Cost(1, latencies.reduce),
        "vote": Cost(1, latencies.vote),
        "match": Cost(1, latencies.shuffle),
        "elect": Cost(1, latencies.vote),
        "bar": Cost(1, 0),
        "barrier": Cost(1, 0),
        "bra": Cost(1, 0),
        "ret": Cost(1, 0),
        "exit": Cost(1, 0),
        "st": Cost(1, 0),
        "prefetch": Cost(1, 0),
        "nanosleep": Cost(1, 0),
        "membar": Cost(1, 0),
        "fence": Cost(1, 0),
        "griddepcontrol": Cost(1, 0),
        "call": Cost(latencies.call, 0),
        "cvta": FREE,
        "ex2": SPECIAL,
        "lg2": SPECIAL,
        "setp": _comparison(kind),
    }
    if name in fixed:
        return fixed[name]
    if name == "mov":
        return ALU if kind == "pred" else FREE
    if name in ("ld", "atom", "red", "cp"):
        return FREE if "param" in instruction.opcode else Cost(1, 0)
    if name == "cvt":
        return _conversion(instruction)
    return _arithmetic(instruction)


def _comparison(kind: str) -> Cost:
    if kind == "f64":
        return Cost(1, 12)
    return Cost(2, 10) if _bits(kind) == 64 else Cost(1, 6)


def _conversion(instruction: Instruction) -> Cost:
    to, source = instruction.opcode[-2:]
    floats = [kind for kind in (to, source) if kind.startswith(("f", "bf"))]
    if "f64" in floats:
        return CONVERT_64
    if floats:
        return ALU if {to, source} & {"f16", "bf16"} else CONVERT
    if source == "s64" or (_bits(to) == 64 and _bits(source) == 64):
        return ALU
    return FREE if _bits(source) >= 16 and _bits(to) >= 16 and to != "s64" else ALU


def _arithmetic(instruction: Instruction) -> Cost:
    name, kind, parts = instruction.opcode[0], instruction.type, instruction.opcode
    wide = _bits(kind) == 64 and kind != "f64"
    if name in ("div", "rem"):
        approximate = "approx" in parts or "full" in parts
        return _APPROXIMATE_DIVISION if approximate else _DIVISIONS.get(kind, _DIVISION_64)
    if name in ("rcp", "rsqrt", "sqrt"):
        if "approx" in parts:
            return SPECIAL
        return _RECIPROCAL if name == "rcp" else _SQUARE_ROOT
    if name in ("min", "max"):
        return Cost(3, 14) if _bits(kind) == 64 else ALU
    if kind == "f64":
        return ALU if name in ("selp", "neg", "abs") else FP64
    if name in ("mul", "fma", "mad") and wide and "wide" not in parts:
        return MULTIPLY_HIGH_64 if "hi" in parts else MULTIPLY_64
    if name in _LOGIC or name == "selp":
        return LOGIC_64 if wide else ALU
    if name in ("add", "sub", "neg", "shl", "shr", "bfi", "bfe", "popc", "clz"):
        return ALU_64 if wide else ALU
    return ALU
