"""What instructions of PTX do, to the lanes of many warps at once.

Registers are arrays ``[warps, 32]``. `compile_kernel` makes an `Operation` of each instruction;
`Operation.execute` works on the warps that are chosen (an index into the first dimension) and on
the lanes of a mask ``[chosen, 32]`` (None: all). Arithmetic follows PTX but for the last bit of
fused float64 multiply-adds and of approximate functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .costs import cost
from .machine import Latencies
from .memory import LINE, POISON, Addresses, GlobalMemory, Places
from .ptx import TYPES, Instruction, Kernel, Variable, address, split_operands

LANES = 32

Array = NDArray[Any]
Chosen = Any  # an index of warps: a slice or an array of integers
Mask = NDArray[np.bool_] | None
Getter = Callable[["State", Chosen], Any]

DTYPES: dict[str, np.dtype] = {
    **{f"{k}{8 * n}": np.dtype(f"u{n}") for k in "bu" for n in (1, 2, 4, 8)},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{"f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)},
    **{"f16": np.dtype("u2"), "bf16": np.dtype("u2")},
    **{"f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")},
}

# In the highest byte of a generic address; global memory has 0 there.
_WINDOWS = {"shared": 1, "local": 2, "param": 3}
_IN_WINDOW = np.uint64((1 << 56) - 1)


class Kind(Enum):
    """How the simulation treats an operation."""

    COMPUTE = auto()
    MEMORY = auto()
    BRANCH = auto()
    EXIT = auto()
    BARRIER = auto()  # of a block
    COLLECTIVE = auto()  # of a warp
    FENCE = auto()
    SLEEP = auto()
    COPIES = auto()  # asynchronous ones, that are grouped or waited for
    CHAIN = auto()  # the end of the launch before is waited for
    NOTHING = auto()


@dataclass
class Operation:
    """An instruction, ready to be executed."""

    instruction: Instruction
    kind: Kind
    issue: int
    latency: int
    sources: Array | None  # numbers of registers, [n, 1]
    targets: tuple[int, ...]
    execute: Callable[..., Any] | None = None
    predicate: Getter | None = None
    target: int = -1  # of a branch: the place in the code
    members: Getter | None = None  # of a collective: the lanes that meet
    shared_by_blocks: bool = False  # others may see it, or it may see what others did
    looks: bool = False  # and it changes nothing


class State:
    """What the threads of some blocks have: registers, shared and local memory, parameters."""

    def __init__(
        self,
        kernel: Program,
        blocks: Sequence[int],
        threads: int,
        parameters: bytes,
        grid: int,
        memory: GlobalMemory,
    ) -> None:
        if threads % LANES:
            raise ValueError(f"whole warps are expected, got {threads} threads a block")
        per_block = threads // LANES
        self.warps = len(blocks) * per_block
        self.block = np.repeat(np.arange(len(blocks)), per_block)  # [warps], as they are numbered
        self.kernel = kernel
        self.memory = memory
        self.registers: list[Array | None] = [None] * len(kernel.types)
        self.lane = np.broadcast_to(np.arange(LANES, dtype=np.uint32), (self.warps, LANES))
        first = np.tile(np.arange(per_block, dtype=np.uint32) * LANES, len(blocks))
        self.thread = first[:, None] + self.lane
        numbers = np.array(blocks, np.uint32)[self.block]
        self.special = {
            "%laneid": self.lane,
            "%tid.x": self.thread,
            "%ctaid.x": np.broadcast_to(numbers[:, None], (self.warps, LANES)),
            "%ntid.x": np.full((1, 1), threads, np.uint32),
            "%nctaid.x": np.full((1, 1), grid, np.uint32),
            **{f"%{what}.{axis}": np.zeros((1, 1), np.uint32)
               for what in ("tid", "ctaid") for axis in "yz"},
            **{f"%{what}.{axis}": np.ones((1, 1), np.uint32)
               for what in ("ntid", "nctaid") for axis in "yz"},
            "%lanemask_lt": (np.uint32(1) << self.lane) - np.uint32(1),
        }  # fmt: skip
        self.shared = np.full(len(blocks) * kernel.shared_bytes, POISON, np.uint8)
        self.local = np.full(self.warps * LANES * kernel.local_bytes, POISON, np.uint8)
        self.copying = np.zeros(self.warps)  # when the copies of no group yet will be there
        self.copied: list[list[float]] = [[] for _ in range(self.warps)]  # when groups will be
        size = -(-kernel.parameter_bytes // 16) * 16  # whatever type it is viewed as
        self.parameters = np.frombuffer(parameters.ljust(size, b"\0"), np.uint8)

    def of_chosen(self, values: Array, chosen: Chosen) -> Array:
        """Take the chosen warps' rows of an array that may have one row for all."""
        return values if len(values) == 1 else values[chosen]

    def register(self, number: int) -> Array:
        """Give a register of all warps."""
        values = self.registers[number]
        if values is None:
            dtype = DTYPES[self.kernel.types[number]]
            values = self.registers[number] = np.zeros((self.warps, LANES), dtype)
        return values

    def set(self, number: int, chosen: Chosen, mask: Mask, value: Any) -> None:
        """Set a register, with the value's bits; narrower integers are extended."""
        values = self.register(number)
        value = as_stored(np.asarray(value), values.dtype)
        if mask is None:
            values[chosen] = value
        elif isinstance(chosen, slice):
            np.copyto(values, value, where=mask)
        else:
            values[chosen] = np.where(mask, value, values[chosen])


def as_stored(value: Array, dtype: np.dtype) -> Array:
    """Give the bits of a value in a register of some type."""
    if value.dtype == dtype:
        return value
    if bool in (value.dtype, dtype):
        return value.astype(dtype)
    if value.dtype.itemsize != dtype.itemsize:
        if value.dtype.kind == "f":
            value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
        value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{dtype.itemsize}")
    return np.ascontiguousarray(value).reshape(value.shape).view(dtype)


class Program:
    """A kernel's operations, with the places of its variables."""

    def __init__(self, kernel: Kernel, latencies: Latencies) -> None:
        self.kernel = kernel
        self.latencies = latencies
        self.types: list[str] = list(kernel.registers.values())
        self.number = {name: n for n, name in enumerate(kernel.registers)}
        self.parameters, self.parameter_bytes = _places(kernel.parameters)
        self.shared, shared_bytes = _places(kernel.shared)
        self.local, local_bytes = _places(kernel.local)
        self.shared_bytes = -(-shared_bytes // 16) * 16
        self.local_bytes = -(-local_bytes // 16) * 16
        self.operations = [_Builder(self, i).build() for i in kernel.code]
        self.waits = any(o.kind is Kind.SLEEP for o in self.operations)  # for other blocks

    def pack(self, parameters: Sequence[bytes]) -> bytes:
        """Lay out parameters as the kernel expects them."""
        packed = bytearray(self.parameter_bytes)
        for variable, value in zip(self.kernel.parameters, parameters, strict=True):
            if len(value) != variable.bytes:
                raise ValueError(
                    f"{variable.name}: {variable.bytes} bytes were expected, got {len(value)}"
                )
            place = self.parameters[variable.name]
            packed[place : place + variable.bytes] = value
        return bytes(packed)


def _places(variables: Sequence[Variable]) -> tuple[dict[str, int], int]:
    places, end = {}, 0
    for name, alignment, size in variables:
        places[name] = -(-end // alignment) * alignment
        end = places[name] + size
    return places, end


# ---- arithmetic ----------------------------------------------------------------------------------


def _truncated_division(a: Array, b: Array) -> Array:
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient += ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return quotient


def _remainder(a: Array, b: Array) -> Array:
    return a - _truncated_division(a, b) * b


def _high_product(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    wide = a.astype(object) * b.astype(object)
    return (wide >> bits).astype(a.dtype)


def _shift_left(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a << np.minimum(b, bits - 1).astype(a.dtype)
    return np.where(b >= bits, a.dtype.type(0), shifted)


def _shift_right(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(b, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(b >= bits, a.dtype.type(0), shifted)


def _fused(a: Array, b: Array, c: Array) -> Array:
    wide = np.longdouble if np.asarray(a).dtype == np.float64 else np.float64
    return (np.asarray(a).astype(wide) * b + c).astype(np.asarray(a).dtype)


def _flushed(value: Array) -> Array:
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.float32(0), value)


def _population(a: Array) -> Array:
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, a.dtype.itemsize)
    return np.unpackbits(octets, axis=-1).sum(-1).astype(np.uint32)


def _leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    length = np.zeros(a.shape, np.uint32)
    for bit in range(bits):
        length = np.where(a >> a.dtype.type(bit) != 0, np.uint32(bit + 1), length)
    return np.uint32(bits) - length


def _reversed(a: Array) -> Array:
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, a.dtype.itemsize)
    bits = np.unpackbits(octets[..., ::-1], axis=-1, bitorder="little")
    bits = bits.reshape(*a.shape, -1, 8)[..., ::-1].reshape(*a.shape, -1)
    return np.packbits(bits, axis=-1, bitorder="little").view(a.dtype)[..., 0]


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for k in range(4):
        choice = selector >> np.uint32(4 * k)
        octet = (both >> ((choice & np.uint32(7)) * np.uint32(8)).astype(np.uint64)) & np.uint64(
            255
        )
        sign = np.where(octet >= 128, np.uint64(255), np.uint64(0))
        octet = np.where(choice & np.uint32(8), sign, octet)
        result |= octet.astype(np.uint32) << np.uint32(8 * k)
    return result


def _inserted(a: Array, b: Array, position: Array, length: Array) -> Array:
    kind = b.dtype.type
    ones = _shift_left(np.asarray(kind(1)), length) - kind(1)
    field = _shift_left(np.broadcast_to(ones, b.shape), position)
    return (b & ~field) | (_shift_left(a, position) & field)


def _extracted(a: Array, position: Array, length: Array) -> Array:
    kind = a.dtype.type
    ones = _shift_left(np.asarray(kind(1)), length) - kind(1)
    field = _shift_right(a, position) & ones
    if a.dtype.kind == "i":
        sign = _shift_left(np.asarray(kind(1)), np.maximum(length, 1) - np.uint32(1))
        field = (field ^ sign) - sign
    return field


def _picked_halves(bits_to_float: Callable[[Array], Array], pick: Any, a: Array, b: Array) -> Array:
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
    for shift in (0, 16):
        x, y = ((v >> np.uint32(shift)) & np.uint32(0xFFFF) for v in (a, b))
        first = pick(bits_to_float(x), bits_to_float(y)) == bits_to_float(x)
        nan = np.isnan(bits_to_float(y))
        result |= np.where(first | nan, x, y) << np.uint32(shift)
    return result


def float_of_bf16(bits: Array) -> Array:
    """Give the float32 of the lowest 16 bits."""
    return np.ascontiguousarray(bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_of_f16(bits: Array) -> Array:
    """Give the float32 of the lowest 16 bits."""
    return np.ascontiguousarray(bits.astype(np.uint16)).view(np.float16).astype(np.float32)


def _saturated(value: Array, dtype: np.dtype) -> Array:
    limits = np.iinfo(dtype)
    value = np.where(np.isnan(value), 0.0, value.astype(np.longdouble))
    inside = np.clip(value, np.longdouble(limits.min), np.longdouble(limits.max))
    return inside.astype(dtype)


_COMPARISONS: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_LOGIC: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}

_BINARY: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_UNARY: dict[str, Any] = {
    "abs": np.abs,
    "not": np.invert,
    "sqrt": np.sqrt,
    "lg2": np.log2,
    "popc": _population,
    "clz": _leading_zeros,
    "brev": _reversed,
}
_ROUNDINGS: dict[str, Any] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}

_ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "exch": lambda old, x: x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "cas": lambda old, expected, x: x if old == expected else old,
}


# ---- instructions --------------------------------------------------------------------------------


class _Builder:
    """Makes an operation of one instruction."""

    def __init__(self, program: Program, instruction: Instruction) -> None:
        self.program = program
        self.instruction = instruction
        self.parts = instruction.opcode
        self.type = instruction.type
        self.operands = instruction.operands
        self.sources: list[int] = []
        self.targets: list[int] = []

    def refusal(self) -> NotImplementedError:
        """Say that a kernel has an instruction which no kernel had so far."""
        return NotImplementedError(f"the model does not know {self.instruction}")

    def build(self) -> Operation:
        name = self.parts[0]
        predicate = None
        if self.instruction.predicate is not None:
            predicate = self.value(self.instruction.predicate, "pred")
            if self.instruction.negated:
                predicate = self._negated(predicate)
        issue, latency = cost(self.instruction, self.program.latencies)
        operation = Operation(
            self.instruction, Kind.COMPUTE, issue, latency, None, (), predicate=predicate
        )
        maker = getattr(self, f"_{name}", None)
        if maker is not None:
            maker(operation)
        elif name in _BINARY:
            self._binary(operation, _BINARY[name])
        elif name in _UNARY:
            self._unary(operation, _UNARY[name])
        else:
            raise self.refusal()
        if self.sources:
            operation.sources = np.array(sorted(set(self.sources)))[:, None]
        operation.targets = tuple(self.targets)
        return operation

    # -- operands --

    @staticmethod
    def _negated(getter: Getter) -> Getter:
        return lambda state, chosen: ~getter(state, chosen)

    def value(self, text: str, kind: str | None = None) -> Getter:
        """Give what reads an operand, as a type."""
        kind = kind or self.type
        dtype = DTYPES[kind]
        if text.startswith("!"):
            return self._negated(self.value(text[1:], kind))
        if text in self.program.number:
            return self._register_value(self.program.number[text], dtype)
        if text.startswith("%"):
            return lambda state, chosen: state.of_chosen(state.special[text], chosen).view(dtype)
        for places in (self.program.shared, self.program.local, self.program.parameters):
            if text in places:
                place = np.full((1, 1), places[text], dtype)
                return lambda state, chosen: place
        constant = np.full((1, 1), _number(text, dtype), dtype)
        return lambda state, chosen: constant

    def _register_value(self, number: int, dtype: np.dtype) -> Getter:
        self.sources.append(number)
        own = DTYPES[self.program.types[number]]
        if own == dtype:
            return lambda state, chosen: state.register(number)[chosen]
        return lambda state, chosen: as_stored(state.register(number)[chosen], dtype)

    def target(self, text: str) -> int:
        """Note that a register is written."""
        number = self.program.number[text]
        self.targets.append(number)
        return number

    def names(self, text: str) -> tuple[str, ...]:
        """Give the registers of a vector, or the one that there is."""
        return split_operands(text[1:-1]) if text.startswith("{") else (text,)

    # -- arithmetic --

    def _compute(self, operation: Operation, function: Any, *getters: Getter) -> None:
        number = self.target(self.operands[0])

        def execute(state: State, chosen: Chosen, mask: Mask) -> None:
            state.set(number, chosen, mask, function(*(g(state, chosen) for g in getters)))

        operation.execute = execute

    def _unary(self, operation: Operation, function: Any) -> None:
        self._compute(operation, function, self.value(self.operands[1]))

    def _binary(self, operation: Operation, function: Any) -> None:
        self._compute(operation, function, *map(self.value, self.operands[1:3]))

    def _mul(self, operation: Operation) -> None:
        if "wide" in self.parts:
            wide = np.dtype(f"{'i' if self.type[0] == 's' else 'u'}{2 * TYPES[self.type]}")
            self._binary(operation, lambda a, b: a.astype(wide) * b.astype(wide))
        else:
            self._binary(operation, _high_product if "hi" in self.parts else np.multiply)

    def _mad(self, operation: Operation) -> None:
        a, b = map(self.value, self.operands[1:3])
        kind, bits = self.type, 8 * TYPES[self.type]
        if "wide" in self.parts:
            wide = f"{kind[0]}{2 * bits}"
            c = self.value(self.operands[3], wide)
            to = DTYPES[wide]
            self._compute(operation, lambda a, b, c: a.astype(to) * b.astype(to) + c, a, b, c)
        else:
            product = _high_product if "hi" in self.parts else np.multiply
            c = self.value(self.operands[3])
            self._compute(operation, lambda a, b, c: product(a, b) + c, a, b, c)

    def _fma(self, operation: Operation) -> None:
        if self.type not in ("f32", "f64"):
            raise self.refusal()
        self._compute(operation, _fused, *map(self.value, self.operands[1:4]))

    def _div(self, operation: Operation) -> None:
        self._binary(operation, np.divide if self.type[0] == "f" else _truncated_division)

    def _rem(self, operation: Operation) -> None:
        self._binary(operation, _remainder)

    def _rcp(self, operation: Operation) -> None:
        self._unary(operation, np.reciprocal)

    def _rsqrt(self, operation: Operation) -> None:
        self._unary(operation, lambda a: np.reciprocal(np.sqrt(a)))

    def _ex2(self, operation: Operation) -> None:
        self._unary(operation, lambda a: _flushed(np.exp2(a.astype(np.float64)).astype(a.dtype)))

    def _neg(self, operation: Operation) -> None:
        self._unary(operation, np.negative)

    def _not(self, operation: Operation) -> None:
        self._unary(operation, np.logical_not if self.type == "pred" else np.invert)

    def _logic(self, operation: Operation) -> None:
        name = self.parts[0]
        self._binary(operation, _LOGIC[name] if self.type == "pred" else _BINARY[name])

    _and = _or = _xor = _logic

    def _min(self, operation: Operation) -> None:
        self._extreme(operation, np.fmin, np.minimum)

    def _max(self, operation: Operation) -> None:
        self._extreme(operation, np.fmax, np.maximum)

    def _extreme(self, operation: Operation, quiet: Any, strict: Any) -> None:
        if self.type in ("bf16x2", "f16x2"):
            as_float = float_of_bf16 if self.type == "bf16x2" else float_of_f16
            pick = strict if "NaN" in self.parts else quiet
            self._binary(operation, lambda a, b: _picked_halves(as_float, pick, a, b))
        else:
            floats = self.type[0] == "f" and "NaN" not in self.parts
            self._binary(operation, quiet if floats else strict)

    def _shl(self, operation: Operation) -> None:
        a, b = self.value(self.operands[1]), self.value(self.operands[2], "u32")
        self._compute(operation, _shift_left, a, b)

    def _shr(self, operation: Operation) -> None:
        a, b = self.value(self.operands[1]), self.value(self.operands[2], "u32")
        self._compute(operation, _shift_right, a, b)

    def _shf(self, operation: Operation) -> None:
        right, wrap = self.parts[1] == "r", "wrap" in self.parts

        def function(low: Array, high: Array, by: Array) -> Array:
            both = high.astype(np.uint64) << np.uint64(32) | low
            shift = (by & np.uint32(31) if wrap else np.minimum(by, 32)).astype(np.uint64)
            return (both >> shift if right else both << shift >> np.uint64(32)).astype(np.uint32)

        self._compute(operation, function, *(self.value(x, "u32") for x in self.operands[1:4]))

    def _prmt(self, operation: Operation) -> None:
        self._compute(operation, _permuted, *(self.value(x, "u32") for x in self.operands[1:4]))

    def _bfi(self, operation: Operation) -> None:
        a, b = map(self.value, self.operands[1:3])
        place, length = (self.value(x, "u32") for x in self.operands[3:5])
        self._compute(operation, _inserted, a, b, place, length)

    def _bfe(self, operation: Operation) -> None:
        place, length = (self.value(x, "u32") for x in self.operands[2:4])
        self._compute(operation, _extracted, self.value(self.operands[1]), place, length)

    def _bfind(self, operation: Operation) -> None:
        if self.type[0] == "s":
            raise self.refusal()
        shift = "shiftamt" in self.parts

        def function(a: Array) -> Array:
            before = _leading_zeros(a)
            found = before if shift else np.uint32(8 * a.dtype.itemsize - 1) - before
            return np.where(a == 0, np.uint32(0xFFFFFFFF), found)

        self._unary(operation, function)

    def _lop3(self, operation: Operation) -> None:
        table = int(self.operands[4], 0)

        def function(a: Array, b: Array, c: Array) -> Array:
            result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
            for k in range(8):
                if table >> k & 1:
                    x, y, z = a if k & 4 else ~a, b if k & 2 else ~b, c if k & 1 else ~c
                    result |= x & y & z
            return result

        self._compute(operation, function, *(self.value(x, "u32") for x in self.operands[1:4]))

    def _setp(self, operation: Operation) -> None:
        name = self.parts[1]
        combine = _LOGIC[self.parts[2]] if self.parts[2] in _LOGIC else None
        unordered = self.type[0] == "f" and len(name) == 3 and name.endswith("u")
        compare = _COMPARISONS[name[:2] if unordered else name]

        def function(a: Array, b: Array, *c: Array) -> Array:
            result = compare(a, b)
            if unordered:
                result = result | np.isnan(a) | np.isnan(b)
            elif name == "ne" and a.dtype.kind == "f":
                result = result & ~(np.isnan(a) | np.isnan(b))
            return result if combine is None else combine(result, c[0])

        getters = [self.value(x) for x in self.operands[1:3]]
        if combine is not None:
            getters.append(self.value(self.operands[3], "pred"))
        self._compute(operation, function, *getters)

    def _selp(self, operation: Operation) -> None:
        a, b = map(self.value, self.operands[1:3])
        choice = self.value(self.operands[3], "pred")
        self._compute(operation, lambda a, b, c: np.where(c, a, b), a, b, choice)

    def _cvta(self, operation: Operation) -> None:
        source = self.value(self.operands[1], "u64")
        if self.parts[1] == "to":
            self._compute(operation, lambda a: a & _IN_WINDOW, source)
        else:
            window = np.uint64(_WINDOWS.get(self.parts[1], 0) << 56)
            self._compute(operation, lambda a: a | window, source)

    def _cvt(self, operation: Operation) -> None:
        to, kind = self.parts[-2:]
        source = self.value(self.operands[1], kind)
        rounding = next((_ROUNDINGS[p] for p in self.parts if p in _ROUNDINGS), None)
        dtype = DTYPES[to]
        if kind in ("f16", "bf16"):
            as_float = float_of_f16 if kind == "f16" else float_of_bf16
            function: Any = lambda a: as_float(a).astype(dtype)  # noqa: E731
        elif to in ("f16", "bf16"):
            raise self.refusal()
        elif kind[0] == "f" and dtype.kind != "f":
            function = lambda a: _saturated((rounding or np.trunc)(a), dtype)  # noqa: E731
        elif rounding is not None:
            function = lambda a: rounding(a).astype(dtype)  # noqa: E731
        elif "sat" in self.parts:
            function = lambda a: np.clip(a, 0, 1).astype(dtype)  # noqa: E731
        else:
            function = lambda a: a.astype(dtype)  # noqa: E731
        self._compute(operation, function, source)

    def _mov(self, operation: Operation) -> None:
        to, source = self.operands
        if to.startswith("{"):
            self._unpack(operation, self.names(to), source)
        elif source.startswith("{"):
            self._pack(operation, self.names(source))
        else:
            self._unary(operation, lambda a: a)

    def _unpack(self, operation: Operation, names: Sequence[str], source: str) -> None:
        getter = self.value(source)
        numbers = [self.target(name) for name in names]
        part = np.dtype(f"u{TYPES[self.type] // len(names)}")

        def execute(state: State, chosen: Chosen, mask: Mask) -> None:
            whole = np.ascontiguousarray(getter(state, chosen))
            parts = whole.view(part).reshape(*whole.shape, len(names))
            for k, number in enumerate(numbers):
                state.set(number, chosen, mask, parts[..., k])

        operation.execute = execute

    def _pack(self, operation: Operation, names: Sequence[str]) -> None:
        part = f"b{8 * TYPES[self.type] // len(names)}"
        getters = [self.value(name, part) for name in names]
        number = self.target(self.operands[0])
        dtype = DTYPES[self.type]

        def execute(state: State, chosen: Chosen, mask: Mask) -> None:
            parts = np.broadcast_arrays(*(getter(state, chosen) for getter in getters))
            whole = np.ascontiguousarray(np.stack(parts, -1)).view(dtype)
            state.set(number, chosen, mask, whole[..., 0])

        operation.execute = execute

    # -- control --

    def _bra(self, operation: Operation) -> None:
        operation.kind = Kind.BRANCH
        operation.target = self.program.kernel.labels[self.operands[0]]

    def _exit(self, operation: Operation) -> None:
        operation.kind = Kind.EXIT

    _ret = _exit

    def _call(self, operation: Operation) -> None:
        operation.kind = Kind.NOTHING

    def _griddepcontrol(self, operation: Operation) -> None:
        operation.kind = Kind.CHAIN if "wait" in self.parts else Kind.NOTHING

    def _membar(self, operation: Operation) -> None:
        operation.kind = Kind.FENCE
        if "cta" in self.parts:
            operation.kind = Kind.NOTHING

    _fence = _membar

    def _nanosleep(self, operation: Operation) -> None:
        operation.kind = Kind.SLEEP
        operation.execute = self.value(self.operands[0], "u32")

    def _bar(self, operation: Operation) -> None:
        if "warp" in self.parts:
            operation.kind = Kind.COLLECTIVE
            operation.members = self.value(self.operands[0], "u32")
            operation.execute = lambda state, chosen, mask: None
            return
        operation.kind = Kind.BARRIER
        if "red" in self.parts:
            value = self.value(self.operands[-1], "pred")
            number = self.target(self.operands[0])
            every = "and" in self.parts

            def execute(state: State, warps: Array, alive: Array) -> None:
                brought = np.broadcast_to(value(state, warps), alive.shape)[alive]
                state.set(
                    number, warps, alive, np.asarray(brought.all() if every else brought.any())
                )

            operation.execute = execute
        elif "sync" not in self.parts:
            raise self.refusal()

    _barrier = _bar

    # -- collectives --

    def _collective(self, operation: Operation, members: str, function: Any, to: str) -> None:
        operation.kind = Kind.COLLECTIVE
        operation.members = self.value(members, "u32")
        number = self.target(to)

        def execute(state: State, chosen: Chosen, mask: Mask) -> None:
            state.set(number, chosen, mask, function(state, chosen, mask))

        operation.execute = execute

    def _vote(self, operation: Operation) -> None:
        value = self.value(self.operands[1], "pred")
        mode = self.parts[2]

        def function(state: State, chosen: Chosen, mask: Mask) -> Array:
            brought = value(state, chosen)
            if mask is not None:
                brought = np.where(mask, brought, mode == "all")
            if mode == "ballot":
                bits = np.where(brought, np.uint32(1) << state.lane[:1], np.uint32(0))
                return np.bitwise_or.reduce(bits, axis=1, keepdims=True)
            return (brought.all if mode == "all" else brought.any)(axis=1, keepdims=True)

        if mode not in ("all", "any", "ballot"):
            raise self.refusal()
        self._collective(operation, self.operands[2], function, self.operands[0])

    def _redux(self, operation: Operation) -> None:
        value = self.value(self.operands[1])
        reduce = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[self.parts[2]]

        def function(state: State, chosen: Chosen, mask: Mask) -> Array:
            brought = value(state, chosen)
            if mask is None:
                return reduce.reduce(brought, axis=1, keepdims=True, dtype=brought.dtype)
            result = np.zeros((len(brought), 1), brought.dtype)
            for row, lanes in enumerate(mask):
                result[row] = reduce.reduce(brought[row][lanes], dtype=brought.dtype)
            return result

        self._collective(operation, self.operands[2], function, self.operands[0])

    def _shfl(self, operation: Operation) -> None:
        mode = self.parts[2]
        to, *inside = self.operands[0].split("|")
        value = self.value(self.operands[1], "b32")
        by, clamp = (self.value(x, "u32") for x in self.operands[2:4])
        flag = self.target(inside[0]) if inside else None

        def sources(state: State, chosen: Chosen) -> tuple[Array, Array]:
            lane = state.lane[:1].astype(np.int64)
            b, c = (g(state, chosen).astype(np.int64) for g in (by, clamp))
            segment = c >> 8 & 31
            last = (lane & segment) | (c & 31 & ~segment)
            source = {
                "up": lane - b,
                "down": lane + b,
                "bfly": lane ^ b,
                "idx": (lane & segment) | (b & 31 & ~segment),
            }[mode]
            fits = source >= last if mode == "up" else source <= last
            return np.where(fits, source, lane), fits

        def function(state: State, chosen: Chosen, mask: Mask) -> Array:
            brought = np.broadcast_to(value(state, chosen), state.lane[chosen].shape)
            source, fits = sources(state, chosen)
            if flag is not None:
                state.set(flag, chosen, mask, fits)
            return np.take_along_axis(brought, np.broadcast_to(source, brought.shape), axis=1)

        self._collective(operation, self.operands[4], function, to)

    # -- memory --

    def _space(self) -> str:
        spaces = ("global", "shared", "local", "param", "const")
        return next((part for part in self.parts for s in spaces if part.startswith(s)), "generic")

    def _address(self, text: str) -> Getter:
        base, offset = address(text)
        getter = self.value(base, "u64")
        by = np.uint64(offset % (1 << 64))
        return (lambda state, chosen: getter(state, chosen) + by) if offset else getter

    def _ld(self, operation: Operation) -> None:
        operation.kind = Kind.MEMORY
        space = self._space()
        get = self._address(self.operands[1])
        if space == "param":
            operation.kind = Kind.COMPUTE
        numbers = [self.target(name) for name in self.names(self.operands[0])]
        dtype = DTYPES[self.type]
        fresh = bool({"volatile", "relaxed", "acquire"} & set(self.parts))
        operation.shared_by_blocks = fresh and space in ("global", "generic")
        operation.looks = operation.shared_by_blocks

        def load(state: State, chosen: Chosen, mask: Mask, access: Access) -> None:
            data = access.data.view(dtype)
            place = access.places // dtype.itemsize
            for k, number in enumerate(numbers):
                state.set(number, chosen, mask, data[place + k])

        def execute(state: State, chosen: Chosen, mask: Mask, start: Any = 0) -> Any:
            latency: Any = 0
            for access, lanes in accesses(state, chosen, mask, space, get(state, chosen)):
                load(state, chosen, lanes, access)
                latency = np.maximum(latency, access.load_latency(state, chosen, start, fresh))
            return latency

        operation.execute = execute

    def _st(self, operation: Operation) -> None:
        operation.kind = Kind.MEMORY
        space = self._space()
        get = self._address(self.operands[0])
        getters = [self.value(name) for name in self.names(self.operands[1])]
        dtype = DTYPES[self.type]
        shown = bool({"volatile", "relaxed", "release"} & set(self.parts))
        operation.shared_by_blocks = shown and space in ("global", "generic")

        def execute(state: State, chosen: Chosen, mask: Mask, start: Any) -> int:
            for access, lanes in accesses(state, chosen, mask, space, get(state, chosen)):
                data = access.data.view(dtype)
                place = access.places // dtype.itemsize
                active = ... if lanes is None else lanes
                for k, getter in enumerate(getters):
                    value = np.broadcast_to(getter(state, chosen), place.shape)
                    data[place[active] + k] = value[active]
                    access.stored(state, access.places[active] + k * dtype.itemsize, dtype.itemsize)
            return 0

        operation.execute = execute

    def _atom(self, operation: Operation) -> None:
        operation.kind = Kind.MEMORY
        space = self._space()
        has_result = self.parts[0] == "atom"
        number = self.target(self.operands[0]) if has_result else None
        operands = self.operands[1 if has_result else 0 :]
        get = self._address(operands[0])
        getters = [self.value(x) for x in operands[1:]]
        function = _ATOMICS[self.parts[-2]]
        dtype = DTYPES[self.type]
        latencies = self.program.latencies
        releases = not {"release", "acq_rel"}.isdisjoint(self.parts)
        operation.shared_by_blocks = space in ("global", "generic")

        def execute(state: State, chosen: Chosen, mask: Mask, start: Any) -> int:
            latency = 0
            before = latencies.fence if releases else 0
            for access, lanes in accesses(state, chosen, mask, space, get(state, chosen)):
                data = access.data.view(dtype)
                places = np.broadcast_to(access.places // dtype.itemsize, state.lane[chosen].shape)
                given = [np.broadcast_to(g(state, chosen), places.shape) for g in getters]
                old = np.zeros(places.shape, dtype)
                active = np.ones(places.shape, bool) if lanes is None else lanes
                for at in zip(*np.nonzero(active), strict=True):
                    old[at] = data[places[at]]
                    data[places[at]] = function(old[at], *(g[at] for g in given))
                access.stored(
                    state, np.broadcast_to(access.places, active.shape)[active], dtype.itemsize
                )
                if number is not None:
                    state.set(number, chosen, lanes, old)
                in_shared = access.space == "shared"
                cycles = latencies.shared_atomic if in_shared else latencies.global_atomic
                latency = max(latency, cycles)
            return before + latency

        operation.execute = execute

    _red = _atom

    def _cp(self, operation: Operation) -> None:
        if self.parts[1] != "async" or "bulk" in self.parts or "mbarrier" in self.parts:
            raise self.refusal()
        if "commit_group" in self.parts:
            self._commit(operation)
        elif "wait_group" in self.parts or "wait_all" in self.parts:
            self._wait(operation, int(self.operands[0], 0) if self.operands else None)
        else:
            self._copy(operation)

    def _commit(self, operation: Operation) -> None:
        operation.kind = Kind.COPIES

        def execute(state: State, chosen: Chosen) -> float:
            for warp in np.arange(state.warps)[chosen]:
                state.copied[warp].append(state.copying[warp])
                state.copying[warp] = 0.0
            return 0.0

        operation.execute = execute

    def _wait(self, operation: Operation, newest: int | None) -> None:
        """Wait for all groups but so many, or for everything."""
        operation.kind = Kind.COPIES

        def execute(state: State, chosen: Chosen) -> Array:
            until = []
            for warp in np.arange(state.warps)[chosen]:
                groups = state.copied[warp]
                old = groups if newest is None else groups[: max(len(groups) - newest, 0)]
                rest = state.copying[warp] if newest is None else 0.0
                until.append(max([*old, rest]))
                state.copied[warp] = groups[len(old) :]
            return np.array(until)

        operation.execute = execute

    def _copy(self, operation: Operation) -> None:
        if len(self.operands) > 3 and self.operands[3] != self.operands[2]:  # a part of zeros
            raise self.refusal()
        operation.kind = Kind.MEMORY
        to, source = (self._address(x) for x in self.operands[:2])
        size = int(self.operands[2], 0)

        def execute(state: State, chosen: Chosen, mask: Mask, start: Any) -> int:
            ((there, lanes),) = accesses(state, chosen, mask, "global", source(state, chosen))
            ((here, _),) = accesses(state, chosen, mask, "shared", to(state, chosen))
            active = ... if lanes is None else lanes
            for offset in range(size):
                octets = there.data[there.places[active] + offset]
                here.data[here.places[active] + offset] = octets
            arrival = start + there.load_latency(state, chosen, start, fresh=True)
            state.copying[chosen] = np.maximum(state.copying[chosen], arrival)
            return 0

        operation.execute = execute

    def _prefetch(self, operation: Operation) -> None:
        operation.kind = Kind.MEMORY
        get = self._address(self.operands[0])

        def execute(state: State, chosen: Chosen, mask: Mask, start: Any) -> int:
            for access, _ in accesses(state, chosen, mask, "global", get(state, chosen)):
                access.load_latency(state, chosen, start, fresh=True)
            return 0

        operation.execute = execute


@dataclass
class Access:
    """Places in one kind of memory that lanes refer to; lanes without a part repeat others'."""

    space: str
    generic: bool
    data: Array
    places: Places

    def load_latency(self, state: State, chosen: Chosen, start: Any, fresh: bool) -> Any:
        """Give the cycles until a load is done, a number for each warp or one for all."""
        latencies = state.kernel.latencies
        fixed = {"shared": latencies.shared, "local": latencies.local, "param": 0}
        if self.space != "global":
            return fixed[self.space] + (latencies.generic if self.generic else 0)
        memory, lines = state.memory, self.places // LINE
        block = state.block[chosen][:, None].astype(np.int32)
        start = np.asarray(start, np.float64).reshape(-1, 1)
        # Blocks are not run in the order of their clocks: whoever asks first has it fetched.
        arrival = np.minimum(memory.arrival[lines], start + latencies.dram)
        near = memory.is_near(lines, block) & (not fresh)
        done = np.maximum(start + np.where(near, latencies.l1, latencies.l2), arrival)
        memory.arrival[lines] = arrival
        memory.touched[lines] = True
        if not fresh:
            memory.come_near(lines, block)
        return done.max(axis=1) - start[:, 0]

    def stored(self, state: State, places: Places, size: int) -> None:
        """Note that so many bytes were written at these of the places."""
        if self.space == "global":
            state.memory.write(places, size)


def accesses(
    state: State, chosen: Chosen, mask: Mask, space: str, addresses: Addresses
) -> list[tuple[Access, Mask]]:
    """Find what addresses refer to: an access for each kind of memory, with its lanes."""
    shape = state.lane[chosen].shape
    addresses = np.broadcast_to(addresses, shape)
    if space != "generic":
        return [(_access(state, chosen, mask, space, addresses, False), mask)]
    tags = addresses >> np.uint64(56)
    seen = np.unique(tags if mask is None else tags[mask]).tolist()
    names = {0: "global", **{tag: name for name, tag in _WINDOWS.items()}}
    found = []
    for tag in seen:
        lanes = mask
        if len(seen) > 1 or not (tags == tag).all():
            lanes = (tags == tag) if mask is None else mask & (tags == tag)
        place = addresses & _IN_WINDOW
        found.append((_access(state, chosen, lanes, names[tag], place, True), lanes))
    return found


def _access(
    state: State, chosen: Chosen, mask: Mask, space: str, addresses: Addresses, generic: bool
) -> Access:
    if mask is not None:
        first = addresses[np.unravel_index(np.argmax(mask), mask.shape)]
        addresses = np.where(mask, addresses, first)
    if space == "global":
        places = state.memory.places(addresses)
        return Access(space, generic, state.memory.view(np.dtype(np.uint8)), places)
    places = addresses.astype(np.int64)
    if space == "param":
        return Access(space, generic, state.parameters, places)
    if space == "shared":
        blocks = state.block[chosen][:, None]
        return Access(space, generic, state.shared, places + blocks * state.kernel.shared_bytes)
    if space == "local":
        numbers = (np.arange(state.warps)[chosen] * LANES)[:, None] + state.lane[:1]
        return Access(space, generic, state.local, places + numbers * state.kernel.local_bytes)
    raise NotImplementedError(f"the model does not know memory of the kind {space}")


def _number(text: str, dtype: np.dtype) -> Any:
    if text.startswith("0f"):
        return np.frombuffer(struct.pack("<I", int(text[2:], 16)), np.float32)[0]
    if text.startswith("0d"):
        return np.frombuffer(struct.pack("<Q", int(text[2:], 16)), np.float64)[0]
    value = int(text, 0)
    if dtype.kind in "fb":
        return dtype.type(value)
    bits = value % (1 << 8 * dtype.itemsize)
    return np.array([bits], f"u{dtype.itemsize}").view(dtype)[0]
