"""`pack_linears`: products, what makes a layer pack again or not at all, the loop, refusals."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_ext
from specdec_ext.decoding import SuffixDrafter, pack_linears, packed
from specdec_ext.decoding.packed import PackedLinear

SIZE = 512  # 2^18 weights, the fewest that are packed


@pytest.fixture(autouse=True, params=["DEFAULT", "AVX2", "AVX512"])
def ways(request, monkeypatch):
    """Which rows go which way, whatever processor this is."""
    found = packed._ways(request.param)
    monkeypatch.setattr(packed, "_WAYS", found)
    return found


def layer(bias: bool = True) -> PackedLinear:
    torch.manual_seed(0)
    made = nn.Linear(SIZE, SIZE, bias=bias).requires_grad_(False)
    assert pack_linears(made) == 4 * SIZE * SIZE
    return made


def is_right(linear: nn.Linear, *shape: int) -> bool:
    """Hold a product against that in float64."""
    x = torch.randn(*shape, SIZE)
    product = linear(x)
    assert product.shape == (*shape, SIZE) and product.dtype == torch.float32
    bias = 0.0 if linear.bias is None else linear.bias.double()
    return torch.allclose(product.double(), x.double() @ linear.weight.double().T + bias, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (2,), (4,), (5,), (32,), (1, 3), (2, 5), (3, 1, 2)]
)
def test_products_of_a_few_rows(shape, bias, ways):
    linear = layer(bias)
    assert is_right(linear, *shape)
    assert (linear._packed is not None) == (math.prod(shape) in ways.packed)


@pytest.mark.parametrize("shape", [(33,), (0,)])
def test_other_products_need_no_packed_weights(shape):
    linear = layer()
    assert is_right(linear, *shape) and linear._packed is None


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_products_are_laid_out_like_torchs(rows):
    product = layer()(torch.randn(1, rows, SIZE))
    assert product.stride() == (rows * SIZE, SIZE, 1)


def test_which_rows_go_which_way(ways):
    """What was measured, by processor; never two ways at once."""
    few, none = range(1, 5), range(0)
    measured = {"DEFAULT": (2, none, none), "AVX2": (5, few, few), "AVX512": (1, none, few)}
    found = {name: (packed._ways(name).packed[0], *packed._ways(name)[1:]) for name in measured}
    assert found == measured
    assert max(ways.packed) == 32 and not set(ways.packed) & set(ways.right)


@pytest.mark.parametrize(("size", "width"), [(SIZE, SIZE), (SIZE - 1, SIZE), (SIZE, 2 * SIZE)])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5])
def test_linear_goes_from_the_right_where_that_is_faster(rows, size, width, ways, monkeypatch):
    """Large weights that are not wider than high, few rows, no gradient, autocast or other type."""
    from_the_right, seen = packed._from_the_right, []
    monkeypatch.setattr(
        packed, "_from_the_right", lambda *given: seen.append(given) or from_the_right(*given)
    )
    x, weight = torch.randn(2, rows, width)[0], torch.randn(size, width) / width**0.5
    expected = x.double() @ weight.double().T
    with torch.no_grad():
        torch.testing.assert_close(packed.linear(x, weight).double(), expected, rtol=0, atol=1e-5)
    assert bool(seen) == (rows in ways.alone and (size, width) == (SIZE, SIZE))
    seen.clear()
    weight.requires_grad_()
    packed.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(size, -1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert packed.linear(x, weight).dtype == torch.bfloat16
    with torch.no_grad():
        assert packed.linear(x.double(), weight.double()).dtype == torch.float64
    assert not seen


def test_inputs_with_strides_and_of_a_wrong_size():
    linear = layer()
    x = torch.randn(SIZE, 12)[:, ::2].T
    assert torch.equal(linear(x), linear(x.contiguous()))
    for wrong in (torch.randn(4, SIZE - 1), torch.randn(4, SIZE + 1), torch.tensor(1.0)):
        with pytest.raises(RuntimeError):
            linear(wrong)


def change_in_place(linear):
    linear.weight.mul_(-2.0)


def load(linear):
    linear.load_state_dict({name: value + 1 for name, value in linear.state_dict().items()})


def replace(linear):
    linear.weight = nn.Parameter(linear.weight + 1, requires_grad=False)


def there_and_back(linear):
    linear.double().float()


@pytest.mark.parametrize("change", [change_in_place, load, replace, there_and_back])
def test_changed_weights_are_packed_again(change):
    linear = layer()
    assert is_right(linear, 6)
    change(linear)
    assert is_right(linear, 6)
    again = linear._packed
    assert is_right(linear, 6) and linear._packed is again  # and once only


def test_copies_and_files_hold_no_packed_weights():
    linear = layer()
    linear(torch.randn(6, SIZE))
    assert linear._packed is not None and [*linear.state_dict()] == ["weight", "bias"]
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for other in (copy.deepcopy(linear), torch.load(file, weights_only=False)):
        assert type(other) is PackedLinear and other._packed is None
        assert is_right(other, 6)


def test_gradients_autocast_other_types_and_compiled_calls_are_torchs():
    linear, plain = layer().requires_grad_(), nn.Linear(SIZE, SIZE)
    plain.load_state_dict(linear.state_dict())
    x = torch.randn(6, SIZE)
    for module in (linear, plain):
        module(x).square().sum().backward()
    assert torch.equal(linear.weight.grad, plain.weight.grad) and linear._packed is None
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        compiled = torch.compile(linear, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), plain(x)) and linear._packed is None
        linear(x)
        assert linear._packed is not None
        with pytest.raises(RuntimeError, match="dtype|type"):
            linear(x.double())
        linear.bfloat16()
        assert linear(x.bfloat16()).dtype == torch.bfloat16 and linear._packed is None


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=600, hidden_size=SIZE, intermediate_size=700, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_of_the_loop(model, temperature):
    own = copy.deepcopy(model)
    count = 2 * (2 * SIZE * SIZE + 3 * SIZE * 700) + 600 * SIZE  # k and v have too few weights
    assert pack_linears(own) == 4 * count
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options = {"max_new_tokens": 24, "gamma": 5, "temperature": temperature, "seeds": 3}
    expected = specdec_ext.generate(model, SuffixDrafter(), ids, **options)
    found = specdec_ext.generate(own, SuffixDrafter(), ids, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.statistics.drafted > 0
    layers = [m for m in own.modules() if isinstance(m, PackedLinear)]
    assert layers and all(m._packed is not None for m in layers)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


def test_what_is_refused(monkeypatch):
    with pytest.raises(TypeError, match="must be a torch.nn.Module, got int 3"):
        pack_linears(3)
    with pytest.raises(ValueError, match="262,144 weights or more, got Linear in torch.float32"):
        pack_linears(nn.Linear(SIZE, SIZE - 1))
    with pytest.raises(ValueError, match="float32 model on a CPU .* in torch.bfloat16 on cpu"):
        pack_linears(nn.Linear(SIZE, SIZE, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="on meta"):
        pack_linears(nn.Linear(SIZE, SIZE, device="meta"))
    with torch.inference_mode():
        untracked = nn.Linear(SIZE, SIZE)
    with pytest.raises(ValueError, match="pack_linears: expected"):
        pack_linears(untracked)
    twice = layer()
    assert pack_linears(twice) == 4 * SIZE * SIZE
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="without oneDNN"):
        pack_linears(twice)
