"""Linear layers whose weights lie in memory as oneDNN reads them, for calls of a few rows.

A target's call in speculative decoding has a few rows, one for each draft token and one more. On a
CPU such a call should take hardly longer than one of a single row, since both read the same
weights; but a general matrix product arranges the weights anew in every call, and takes up to twice
as long for two rows as for one. Arranged once, as here, they are only read.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import shown

__all__ = ["PackedLinear", "pack_linears"]


class _Ways(NamedTuple):
    """Of how many rows products are faster than torch's own, and by what."""

    packed: range  # by packed weights, in a layer that has them
    right: range  # in such a layer, too: by the weights as they are, see `_from_the_right`
    alone: range  # by these where nothing is packed, if there are no fewer outputs than inputs


def _ways(capability: str) -> _Ways:
    """Return what was measured, by the processor's instructions."""
    few = range(1, 5)
    if capability == "AVX2":
        # MKL multiplies the weights with two or four columns in 0.7 times the time that it takes
        # for a vector, or oneDNN with packed weights.
        return _Ways(packed=range(5, 33), right=few, alone=few)
    if capability == "AVX512":
        # On AMD's processors, torch took as long for a vector with two threads as with one.
        return _Ways(packed=range(1, 33), right=range(0), alone=few)
    # A matrix-vector product arranges nothing; many rows pay for it.
    return _Ways(packed=range(2, 33), right=range(0), alone=range(0))


_WAYS = _ways(torch.backends.cpu.get_cpu_capability())
# What the weights are packed for. Packed for one row they served no more than one.
_PACKED_FOR = 4
# Smaller matrices lie in a core's cache, where packing gained nothing.
_SMALLEST = 1 << 18


def _from_the_right(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    count = rows.shape[0]
    if count % 2:  # an odd number of columns takes longer than one more
        rows = torch.cat([rows, rows[:1]])
    product = (weight @ rows.t())[:, :count].t().contiguous()
    if bias is not None:
        product += bias
    return product.view(*input.shape[:-1], -1)


def _is_packable(weight: Tensor) -> bool:
    """Tell whether other products than torch's own are faster for a few rows."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _SMALLEST
        and not weight.is_inference()  # whose changes torch does not count
    )


def _rows_of(input: Tensor, weight: Tensor) -> int:
    """Return how many rows are multiplied; 0 where torch's own product must do it."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return 0
    if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
        return 0
    # What does not fit together is refused by torch's own product.
    if input.dtype != weight.dtype or input.device != weight.device:
        return 0
    if type(input) is not Tensor or input.shape[-1:] != weight.shape[1:]:
        return 0
    if not _is_packable(weight):
        return 0
    return input.numel() // input.shape[-1]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does but for rounding; for a few rows sooner."""
    is_faster = weight.shape[0] >= weight.shape[-1] and _rows_of(input, weight) in _WAYS.alone
    return _from_the_right(input, weight, bias) if is_faster else F.linear(input, weight, bias)


class _Packed(NamedTuple):
    """Packed weights, and what they were packed from."""

    weights: Tensor
    source: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, weight: Tensor) -> _Packed:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR)
        return cls(packed, weakref.ref(weight), weight._version)

    def is_of(self, weight: Tensor) -> bool:
        return self.source() is weight and self.version == weight._version


class PackedLinear(nn.Linear):
    """A linear layer that keeps its float32 weights once more, packed by oneDNN.

    The packed weights are used where no gradient is asked for and there are 2 to 32 rows; with
    AVX-512 for a single row, too. With AVX2 and nothing newer, up to 4 rows are multiplied from the
    right, by the weights as they are. Everywhere else, under autocast and inside
    ``torch.compile``, the layer is a `torch.nn.Linear`. The packed weights are no part of
    ``state_dict()``, are packed again when the weights have changed (through ``.data`` torch does
    not see that), and are not copied with the layer: a copy packs its own. The sums of a product
    are taken in another order, so that results differ by rounding from those of `torch.nn.Linear`.

    Made by `pack_linears`, out of layers that exist.
    """

    _packed: _Packed | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, of ``[..., K]`` float32 inputs ``[..., N]``."""
        rows = _rows_of(input, self.weight)
        if rows in _WAYS.right:
            return _from_the_right(input, self.weight, self.bias)
        if rows not in _WAYS.packed:
            return super().forward(input)
        packed = self._packed
        if packed is None or not packed.is_of(self.weight):
            packed = self._packed = _Packed.of(self.weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, packed.weights, self.bias, "none", [], ""
        )
        return product

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed weights, which can be neither copied nor saved."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


def pack_linears(model: Any) -> int:
    """Make a float32 model's calls of a few tokens faster on a CPU, in place.

    Its linear layers of 2^18 weights or more become `PackedLinear`. They take twice the memory.
    For a target of `specdec_ext.generate`: its calls have a row for each draft token. Calls of a
    single row, as in plain decoding, gain where the processor has AVX2 or AVX-512.

    Parameters
    ----------
    model : torch.nn.Module
        In float32, on a CPU.

    Returns
    -------
    int
        How many bytes the packed weights take once they are used: they are packed by the first call
        that uses them.

    Raises
    ------
    TypeError
        No model.
    ValueError
        A model without such layers: on another device, in another type, or a small one.
    RuntimeError
        This torch has no oneDNN.

    Notes
    -----
    oneDNN is part of torch, which uses the same operators for what ``torch.compile`` compiles with
    weights that are frozen.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU())
    >>> pack_linears(model)
    1048576
    >>> type(model[0]).__name__
    'PackedLinear'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"pack_linears: model must be a torch.nn.Module, got {shown(model)}")
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError("pack_linears: this torch was built without oneDNN (mkldnn)")
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    own = (nn.Linear, PackedLinear)  # other kinds may compute something else
    layers = [layer for layer in linears if type(layer) in own and _is_packable(layer.weight)]
    if not layers:
        kinds = sorted({f"{p.dtype} on {p.device.type}" for p in model.parameters()})
        raise ValueError(
            f"pack_linears: expected a float32 model on a CPU with torch.nn.Linear layers of "
            f"{_SMALLEST:,} weights or more, got {type(model).__name__} in {', '.join(kinds)}"
        )
    for layer in layers:
        layer.__class__ = PackedLinear
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
