"""opcheck for every operator, fullgraph torch.compile equal to eager, torch.export."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import specdec_ext
from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.testing import make_case

POSITIONAL = ("target_logits", "draft_tokens", "draft_logits")


def split(case):
    """Arguments of verify as a call: positional ones, then keywords."""
    args = tuple(case.inputs.get(name) for name in POSITIONAL)
    return args, {k: v for k, v in case.inputs.items() if k not in POSITIONAL}


VERIFY_SAMPLES = {
    **{rule: dict(rule=rule) for rule in RULES},
    "philox": dict(philox=True),
    "packed": dict(packed=True),
    "masks": dict(allowed_mask=True),
    "reduced vocabulary": dict(draft_vocab=9, draft_token_ids=True, allowed_mask=True),
    "probs": dict(draft="probs"),
    "lists": dict(draft="lists"),
    "no draft law": dict(draft="none"),
    "kinds": dict(kinds="mixed"),
    "draft filters": dict(draft_filters=True),
    "padded bfloat16": dict(layout="padded", dtype=torch.bfloat16),
    "float16, other vocabulary": dict(dtype=torch.float16, draft_vocab=11),
    "one request": dict(batch=1, gamma=1),
    "no columns": dict(gamma=0),
    "all outputs": dict(full_accept_probs=True, raw_logprobs=True, rule="token"),
}


def fully_accepted(case):
    """The case with drafts that every rule accepts: no output is NaN, which opcheck needs."""
    if case.inputs["rule"] == "coupled":
        case = case.replace(temperature=torch.zeros(case.batch))
    if "allowed_mask" in case.inputs:
        names = ("target_logits", "draft_logits")  # NaN where nothing was allowed
        everything = {name: case.inputs[name].nan_to_num() for name in names}
        words = torch.full_like(case.inputs["allowed_mask"], -1)
        case = case.replace(allowed_mask=words, **everything)
    rows = case.inputs["target_logits"].float()
    if "target_rows" in case.inputs:
        rows = rows[case.inputs["target_rows"]]
    case = case.replace(draft_tokens=rows[:, :-1].argmax(2), draft_lengths=None)
    if "draft_probs_ids" in case.inputs:
        named = case.inputs["draft_tokens"][..., None]
        case = case.replace(draft_probs=torch.ones(named.shape), draft_probs_ids=named)
    return case if "seeds" in case.inputs else case.replace(uniforms=case.inputs["uniforms"] * 0)


@pytest.mark.parametrize("sample", VERIFY_SAMPLES)
def test_opcheck_verify(sample):
    options = {"batch": 3, "vocab": 9, "masks": False, **VERIFY_SAMPLES[sample]}
    args, kwargs = split(make_case(1, **options))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.specdec.verify.default, args, kwargs, test_utils=checks)
    # The fourth check compares without equal_nan.
    case = fully_accepted(make_case(1, **{**options, "filters": False, "ragged": False}))
    args, kwargs = split(case)
    outputs = torch.ops.specdec.verify(*args, **kwargs)
    assert not any(bool(output.isnan().any()) for output in outputs)
    opcheck(torch.ops.specdec.verify.default, args, kwargs)


def test_opcheck_verify_with_gradients_around():
    args, kwargs = split(fully_accepted(make_case(2, batch=3, vocab=9, masks=False)))
    args = (args[0].requires_grad_(), args[1], args[2].requires_grad_())
    opcheck(torch.ops.specdec.verify.default, args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_filters", [False, True])
def test_opcheck_other_operators(dtype, with_filters):
    case = make_case(3, batch=4, gamma=1, vocab=9)
    target, draft = (case.inputs[k][:, 0].to(dtype) for k in ("target_logits", "draft_logits"))
    filters = {k: case.inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    filters = filters if with_filters else {}
    seeds = torch.arange(4)
    ops = torch.ops.specdec
    opcheck(ops.row_law.default, (target,), filters)
    opcheck(ops.sample.default, (target, case.inputs["uniforms"][:, 0].clone()), filters)
    opcheck(ops.sample.default, (target,), dict(seeds=seeds, positions=seeds, stream=3, **filters))
    opcheck(ops.sample.default, (target,), dict(seeds=seeds, positions=seeds, domain=3))
    opcheck(ops.acceptance.default, (target, draft), filters)
    given = dict(allowed_mask=torch.full((4, 1), -1, dtype=torch.int32))
    opcheck(ops.row_law.default, (target,), {**filters, **given})
    given["draft_token_ids"] = torch.arange(9).flip(0)
    opcheck(ops.sample.default, (target, case.inputs["uniforms"][:, 0].clone()), given)
    opcheck(ops.acceptance.default, (target, draft), {**filters, **given})
    opcheck(ops.uniforms.default, (seeds, seeds, 5), dict(stream=1))


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def decode_step(inputs, rule):
    """What a loop does around verify: tensor arithmetic before and after."""
    logits = inputs["target_logits"] * 1.0
    result = specdec_ext.verify(**{**inputs, "target_logits": logits, "rule": rule})
    length = result.num_accepted.long() + 1
    last = result.tokens.gather(1, length[:, None] - 1)
    return (*result, length, last)


def tensors_of(case):
    return {k: v for k, v in case.inputs.items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("rule", RULES)
def test_fullgraph_equals_eager(rule):
    torch.compiler.reset()
    compiled = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        inputs = tensors_of(make_case(seed, batch=4, vocab=33, philox=True, draft_filters=True))
        assert_same(compiled(inputs, rule), decode_step(inputs, rule))


def test_lists_of_draft_tokens_in_a_graph():
    torch.compiler.reset()
    compiled = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    inputs = tensors_of(make_case(6, batch=4, vocab=33, draft="lists"))
    assert_same(compiled(inputs, "block"), decode_step(inputs, "block"))


def test_inductor_equals_eager():
    torch.compiler.reset()
    compiled = torch.compile(decode_step, fullgraph=True)
    inputs = tensors_of(make_case(4, batch=4, vocab=33))
    assert_same(compiled(inputs, "block"), decode_step(inputs, "block"))


def test_dynamic_shapes_compile_once():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    for batch, gamma, vocab in ((5, 2, 17), (6, 4, 33), (7, 3, 1000)):
        case = make_case(5, batch=batch, gamma=gamma, vocab=vocab, philox=True)
        inputs = tensors_of(case)
        assert_same(compiled(inputs, "block"), decode_step(inputs, "block"))
        counts.add(counter.frame_count)
    assert len(counts) == 1


def test_all_functions_in_one_graph():
    def step(target, draft, seeds, positions):
        law = specdec_ext.row_law(target, temperature=0.7, top_p=0.9)
        drawn = specdec_ext.sample(draft, seeds=seeds, positions=positions, draft_index=1)
        coins = specdec_ext.uniforms(seeds, positions, 3)
        result = specdec_ext.verify(
            torch.stack([target, target, target], 1),
            torch.stack([drawn.tokens, drawn.tokens], 1),
            torch.stack([draft, draft], 1),
            uniforms=coins,
            temperature=0.7,
            draft_temperature=1.0,
        )
        return (*law, *drawn, *result, specdec_ext.acceptance(target, draft))

    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(4, 33, generator=generator) for _ in range(2))
    seeds = torch.arange(4)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(compiled(target, draft, seeds, seeds + 5), step(target, draft, seeds, seeds + 5))


def test_randomness_drawn_in_the_graph():
    def step(target, tokens, draft):
        return specdec_ext.verify(target, tokens, draft)

    torch.compiler.reset()
    inputs = make_case(6, batch=64, gamma=2, vocab=50, filters=False, ragged=False).inputs
    args = [inputs[k] for k in POSITIONAL]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    one, two = compiled(*args), compiled(*args)
    assert not torch.equal(one.tokens, two.tokens)
    torch.manual_seed(0)
    assert_same(compiled(*args), one)
    torch.manual_seed(0)
    assert_same(step(*args), one)


def test_compiled_with_gradients_around():
    # Logits come from a model under autograd; nothing differentiable comes out.
    def step(hidden, weight, tokens, draft, uniforms):
        return specdec_ext.verify(hidden @ weight, tokens, draft, uniforms=uniforms)

    torch.compiler.reset()
    inputs = make_case(7, batch=3, gamma=2, vocab=9).inputs
    weight = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    hidden = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(2))
    args = (hidden, weight, inputs["draft_tokens"], inputs["draft_logits"], inputs["uniforms"])
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        result = function(*args)
        assert not any(output.requires_grad for output in result)


class Verifier(torch.nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, target_logits, draft_tokens, draft_logits, seeds, positions, temperature):
        result = specdec_ext.verify(
            target_logits,
            draft_tokens,
            draft_logits,
            seeds=seeds,
            positions=positions,
            temperature=temperature,
            rule=self.rule,
        )
        return result.tokens, result.num_accepted, result.logprobs, result.accept_probs


def export_args(seed, batch, gamma, vocab):
    inputs = make_case(seed, batch=batch, gamma=gamma, vocab=vocab, philox=True).inputs
    names = (*POSITIONAL, "seeds", "positions", "temperature")
    return tuple(inputs[name] for name in names)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_export(rule):
    module = Verifier(rule)
    args = export_args(8, 3, 2, 17)
    program = torch.export.export(module, args)
    assert_same(program.module()(*args), module(*args))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.specdec.verify.default in targets


class ListVerifier(torch.nn.Module):
    """`verify` with the draft's laws as lists."""

    def forward(self, target, tokens, probs, ids, uniforms):
        given = dict(draft_probs=probs, draft_probs_ids=ids, uniforms=uniforms)
        return specdec_ext.verify(target, tokens, **given)


def test_export_of_lists():
    inputs = make_case(8, batch=3, gamma=2, draft="lists").inputs
    names = ("target_logits", "draft_tokens", "draft_probs", "draft_probs_ids", "uniforms")
    args, module = tuple(inputs[name] for name in names), ListVerifier()
    assert_same(torch.export.export(module, args).module()(*args), module(*args))


def test_export_with_dynamic_shapes(tmp_path):
    batch, gamma = torch.export.Dim("batch", min=2), torch.export.Dim("columns", min=2)
    vocab = torch.export.Dim("vocab", min=2)
    one = {0: batch}
    shapes = (
        {0: batch, 1: gamma + 1, 2: vocab},
        {0: batch, 1: gamma},
        {0: batch, 1: gamma, 2: vocab},
        one,
        one,
        one,
    )
    module = Verifier("block")
    program = torch.export.export(module, export_args(9, 3, 2, 17), dynamic_shapes=shapes)
    path = tmp_path / "verify.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    for batch_size, columns, entries in ((3, 2, 17), (5, 4, 100)):
        args = export_args(10, batch_size, columns, entries)
        assert_same(loaded(*args), module(*args))


def test_under_inference_mode_and_no_grad():
    case = make_case(11, batch=3, vocab=9)
    expected = specdec_ext.verify(**case.inputs)
    with torch.inference_mode():
        assert_same(specdec_ext.verify(**case.inputs), expected)
    with torch.no_grad():
        assert_same(specdec_ext.verify(**case.inputs), expected)
