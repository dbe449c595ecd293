"""The CUDA kernels on the host: the stand-in itself, then what kernels launch, allocate and reach.

That they compute the right thing is tested by every file that runs the table's backends.
"""

from __future__ import annotations

import ctypes
import math
import re
from concurrent.futures import ThreadPoolExecutor

import fibres
import pytest
import torch
from beam_inputs import assert_like, make_inputs
from test_memory import FAR, FENCED

import specdec_ext
from specdec_ext._fake import FAKES
from specdec_ext.backend import has_kernels
from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.contract import (
    TREE_RULES,
    BeamVerifyResult,
    VerifyTreeResult,
    rule_names,
)
from specdec_ext.testing import assert_trees_match, filtered_law, make_case, make_tree_case

WARP = 32
SEEDS = range(10)


# --------------------------------------------------------------------------------------------------
# The stand-in: kernels with known results (csrc/testing/self_test.cu)
# --------------------------------------------------------------------------------------------------


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def numbers(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape) * 7919 % 1009 + 1


@pytest.fixture(params=[(n, seed) for n in fibres.THREADS for seed in SEEDS], ids=str)
def block(request):
    """The self-test library and its block size, under one order of blocks and threads."""
    threads, seed = request.param
    library = fibres.library(f"_fibres_self_test_{threads}")
    assert library.test_threads() == threads
    library.test_seed(ctypes.c_uint64(seed))
    return library, threads


@pytest.mark.parametrize("times", [1, 2, 5])
def test_barriers(block, times):
    library, threads = block
    given, found = numbers(3, threads), torch.zeros(3, threads, dtype=torch.int64)
    library.test_reverse(pointer(given), pointer(found), ctypes.c_int64(3), times)
    assert torch.equal(found, given.flip(1) if times % 2 else given)


def test_collectives(block):
    library, threads = block
    given, found = numbers(threads), torch.zeros(threads, 12, dtype=torch.int64)
    library.test_collect(pointer(given), pointer(found))
    everywhere = torch.ones(threads, dtype=torch.int64)
    warps = given.view(-1, WARP)
    expected = [
        given.sum() * everywhere,
        given.max() * everywhere,
        given.min() * everywhere,
        given.cumsum(0) - given,
        given.sum() * everywhere,
        *(x.repeat_interleave(WARP) for x in (warps.sum(1), warps.amax(1), warps.amin(1))),
        everywhere * bool((given > 0).all()),
        everywhere * bool((given > 100).any()),
        given.sum() // 2 * everywhere,
        given.sum() // 2 * everywhere,
    ]
    assert torch.equal(found, torch.stack(expected, 1))


def test_shuffles(block):
    library, threads = block
    given, found = numbers(threads), torch.zeros(threads, 10, dtype=torch.int64)
    library.test_shuffle(pointer(given), pointer(found))
    warps, lanes = given.view(-1, WARP), torch.arange(WARP)

    def lane(sources):
        return warps[:, sources].reshape(-1)

    ballot = ((warps % 3 == 0) * 2**lanes).sum(1)
    halves = warps[:, :16].sum(1, keepdim=True).expand(-1, 16), warps[:, 16:17].expand(-1, 16)
    half = torch.cat(halves, 1).reshape(-1)
    expected = [
        lane((lanes + 5) % WARP),
        lane(torch.where(lanes >= 3, lanes - 3, lanes)),
        lane(torch.where(lanes + 3 < WARP, lanes + 3, lanes)),
        lane(lanes ^ 9),
        lane(torch.where(lanes % 8 + 3 < 8, lanes + 3, lanes)),
        ballot.repeat_interleave(WARP),
        (warps == given[7]).any(1).long().repeat_interleave(WARP),
        torch.ones(threads, dtype=torch.int64),
        half,
        half.view(-1, WARP)[:, :1].expand(-1, WARP).reshape(-1) + 2,
    ]
    assert torch.equal(found, torch.stack(expected, 1))


def test_shared_add_carries(block):
    # Cells start just below 2^32, and the numbers have high words.
    library, threads = block
    given = torch.arange(threads) * (2**33 + 2**31 - 1) + 1
    found = torch.zeros(4, dtype=torch.int64)
    library.test_add(pointer(given), pointer(found))
    expected = given.view(-1, 4).sum(0) + 0xFFFFFFFF - torch.arange(4)
    assert torch.equal(found, expected)


COLUMNS = [*range(1, 40), *(2**k + d for k in range(6, 31) for d in (-1, 0, 1)), 2**31 - 1, 2**31]


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_places_by_multiplication_are_those_by_division(threads):
    library = fibres.library(f"_fibres_self_test_{threads}")
    generator = torch.Generator().manual_seed(threads)
    for columns in COLUMNS:
        # Where a quotient that is off by a little shows: at multiples of the divisor, and beside.
        rows = torch.randint(0, (2**31 - 1) // columns + 1, [threads - 5], generator=generator)
        beside = rows * columns + torch.randint(-1, 2, rows.shape, generator=generator)
        ends = torch.tensor([0, 1, 2, 2**31 - 2, 2**31 - 1])
        given = torch.cat([beside.clamp(0, 2**31 - 1), ends])
        found = torch.zeros(threads, 2, dtype=torch.int64)
        library.test_place_in(pointer(given), pointer(found), ctypes.c_int64(columns))
        assert torch.equal(found, torch.stack([given // columns, given % columns], 1)), columns


@pytest.mark.parametrize("blocks", [1, 2, 77])
def test_last_block_to_arrive(block, blocks):
    library, threads = block
    partial, total = torch.zeros(blocks, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    arrived = torch.zeros(1, dtype=torch.int32)
    library.test_last_block(
        pointer(partial), pointer(arrived), pointer(total), ctypes.c_int64(blocks)
    )
    assert total.item() == sum(range(blocks)) * sum(range(threads))


def test_blocks_that_wait_for_each_other(block):
    library, _ = block
    turn, who = torch.zeros(1, dtype=torch.int32), torch.full((14,), -1, dtype=torch.int64)
    library.test_take_turns(pointer(turn), pointer(who), 7)
    assert turn.item() == 14 and who.tolist() == [0, 1] * 7


def order_of(library, threads, blocks):
    order, first = (torch.full((n,), -1, dtype=torch.int64) for n in (blocks, threads))
    count = torch.zeros(2, dtype=torch.int32)
    library.test_order(pointer(order), pointer(first), pointer(count), ctypes.c_int64(blocks))
    return order.tolist(), first.tolist()


def test_order_is_random_and_complete(block):
    library, threads = block
    blocks, lanes = order_of(library, threads, 50)
    assert sorted(blocks) == list(range(50)) != blocks
    assert sorted(lanes) == list(range(threads)) != lanes
    assert (blocks, lanes) != order_of(library, threads, 50)


def test_order_is_that_of_the_seed(block):
    library, threads = block
    orders = []
    for seed in (5, 6, 5):
        library.test_seed(ctypes.c_uint64(seed))
        orders.append(order_of(library, threads, 50))
    assert orders[0] == orders[2] != orders[1]


def test_no_blocks_no_launch(block):
    library, _ = block
    none = torch.zeros(0)
    library.test_reverse(pointer(none), pointer(none), ctypes.c_int64(0), 1)


# --------------------------------------------------------------------------------------------------
# Kernels with known mistakes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", fibres.THREADS)
@pytest.mark.parametrize("kernel", ["reverse_without_barrier", "reverse_twice_with_one_barrier"])
def test_a_missing_barrier_shows(threads, kernel):
    library = fibres.library(f"_fibres_self_test_{threads}")
    given = numbers(threads)
    expected = given.flip(0) if kernel == "reverse_without_barrier" else given
    wrong = 0
    for seed in SEEDS:
        library.test_seed(ctypes.c_uint64(seed))
        found = torch.zeros_like(given)
        getattr(library, f"test_{kernel}")(pointer(given), pointer(found))
        wrong += not torch.equal(found, expected)
    assert wrong == len(SEEDS)


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_shared_memory_is_not_kept_between_blocks(threads):
    library = fibres.library(f"_fibres_self_test_{threads}")
    found = set()
    for seed in SEEDS:
        library.test_seed(ctypes.c_uint64(seed))
        out = torch.zeros(1, dtype=torch.int64)
        library.test_count_blocks_in_shared_memory(pointer(out), ctypes.c_int64(5))
        found.add(out.item())
    assert len(found) > 1  # it would be 5 if block 0 came first and nothing happened in between


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_blocks_come_in_between(threads):
    library = fibres.library(f"_fibres_self_test_{threads}")
    for seed in SEEDS:
        library.test_seed(ctypes.c_uint64(seed))
        count = torch.zeros(1, dtype=torch.int64)
        library.test_count_without_atomics(pointer(count), ctypes.c_int64(100))
        assert count.item() < 100


MISTAKES = {
    "barrier_not_for_all": r"wait for others .* {n-1} in __syncthreads at self_test.cu:\d+; 1 ret",
    "different_barriers": r"at different places: __syncthreads at .* and __syncthreads at ",
    "different_types": r"at different places: block_sum at .* and block_sum at ",
    "exchange_not_for_all": r"wait for others .* in __shfl_down_sync at self_test.cu:\d+; .* ret",
    "exchange_with_strangers": "a shuffle reads a lane that does not take part",
    "exchange_outside_mask": "a lane is not in the mask that it gives",
    # Which of the two it is depends on who comes first.
    "different_masks": "threads (that should meet are at different|wait for .*: 1 in __syncwarp)",
    "wait_for_nobody": "blocks wait for each other in vain",
}


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_mistakes_are_errors_that_name_the_kernel(threads):
    library = fibres.library(f"_fibres_self_test_{threads}")
    library.test_mistake_name.restype = ctypes.c_char_p
    said = ctypes.create_string_buffer(1000)
    for i, (kernel, pattern) in enumerate(MISTAKES.items()):
        assert library.test_mistake_name(i).decode() == kernel
        library.test_mistake(i, said, ctypes.c_int64(len(said)))
        expected = rf"{kernel}, block [01]: .*{pattern.replace('{n-1}', str(threads - 1))}"
        assert re.match(expected, said.value.decode())
        # What comes after is not harmed.
        test_barriers((library, threads), 1)
    assert library.test_mistake_name(len(MISTAKES)) is None


@pytest.mark.parametrize("threads", fibres.THREADS)
@pytest.mark.parametrize("percent", [0, 50, 100])
def test_all_threads_of_a_chained_launch_wait_for_the_one_before(threads, percent):
    library = fibres.library(f"_fibres_self_test_{threads}")
    said = ctypes.create_string_buffer(1000)
    library.test_chain(percent, said, ctypes.c_int64(len(said)))
    waited, all_threads = 2 * threads * percent // 100, 2 * threads
    expected = f"second: {waited} of {all_threads} threads waited for the launch before"
    assert said.value.decode() == ("" if percent == 100 else expected)


@pytest.mark.parametrize("threads", fibres.THREADS)
@pytest.mark.parametrize("waits_first", [False, True])
def test_what_launches_leave_is_there_for_those_who_wait(threads, waits_first):
    library = fibres.library(f"_fibres_self_test_{threads}")
    left, taken = ctypes.c_int(0), (ctypes.c_int * 2)()
    library.test_early(int(waits_first), ctypes.byref(left), taken)
    assert left.value == 5  # what is written too early is lost
    assert [value == 5 for value in taken] == [waits_first] * 2


@pytest.mark.parametrize("threads", fibres.THREADS)
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("of_second", [False, True])
def test_what_is_there_before_the_wait(threads, in_turn, of_second):
    # What the first of three launches has left, if the second one waited before it let the third
    # one begin; what the second one writes never is.
    library = fibres.library(f"_fibres_self_test_{threads}")
    left, taken = (ctypes.c_int * 2)(), (ctypes.c_int * 2)()
    library.test_early_of_third(int(in_turn), int(of_second), left, taken)
    assert list(left) == [5, 7]  # what is written too early is lost
    expected = 7 if of_second else 5
    assert [value == expected for value in taken] == [in_turn and not of_second] * 2


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_kernels_are_loaded_before_they_are_launched(threads):
    library = fibres.library(f"_fibres_self_test_{threads}")
    said = ctypes.create_string_buffer(1000)
    library.test_not_loaded(said, ctypes.c_int64(len(said)))
    assert said.value.decode() == "not_loaded is launched, but was not loaded"


# --------------------------------------------------------------------------------------------------
# The operators on fibres
# --------------------------------------------------------------------------------------------------

OPERATORS = [name for name in FAKES if has_kernels(name, "cuda")]
READ_DRAFT_LAW = rule_names(reads_draft_law=True)
MASKED = dict(allowed_mask=True)
REDUCED = dict(draft_vocab=50, draft_token_ids=True)
FILTERS = ("temperature", "top_k", "top_p", "min_p")

threads_of_a_block = pytest.mark.parametrize("threads", fibres.THREADS)


def everything(operators, case):
    """All operators on one case."""
    inputs = case.inputs
    logits, draft = inputs["target_logits"][:, 0], inputs["draft_logits"][:, 0]
    params = {name: inputs[name] for name in FILTERS if name in inputs}
    if "allowed_mask" in inputs:
        params["allowed_mask"] = inputs["allowed_mask"][:, 0]
    ids = {"draft_token_ids": inputs["draft_token_ids"]} if "draft_token_ids" in inputs else {}
    seeds = torch.arange(case.batch)
    noise = dict(seeds=seeds, positions=seeds)
    return [
        *operators.verify(**inputs),
        *operators.row_law(logits, **params),
        *operators.sample(logits, **noise, **params),
        *operators.sample(draft, **noise, **params, **ids, domain=3),
        operators.acceptance(logits, draft, **params, **ids),
        operators.uniforms(seeds, seeds, 7),
    ]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@threads_of_a_block
@pytest.mark.parametrize("name", OPERATORS)
def test_schemas_are_the_operators(threads, name):
    found = str(getattr(fibres.operators(threads), name).default._schema)
    expected = str(getattr(torch.ops.specdec, name).default._schema)
    assert found.replace(f"specdec_fibres_{threads}", "specdec") == expected


@threads_of_a_block
def test_a_kernel_that_breaks_is_an_error_of_the_operator(threads):
    operators = fibres.operators(threads)
    case = make_case(1, batch=2, vocab=33)
    expected = everything(operators, case)
    fibres.lose_thread(threads, threads - 1)
    with pytest.raises(RuntimeError, match=r"\w+, block \d+: threads wait for others that never"):
        operators.verify(**case.inputs)
    assert_same(everything(operators, case), expected)


@threads_of_a_block
@pytest.mark.parametrize("rule", RULES)
def test_order_of_blocks_and_threads_changes_nothing(threads, rule):
    operators = fibres.operators(threads)
    features = dict(allowed_mask=True, draft_token_ids=True, draft_vocab=2001)
    case = make_case(
        7, batch=3, gamma=3, vocab=5003, rule=rule, philox=True, raw_logprobs=True, **features
    )
    expected = everything(operators, case)
    for seed in range(3):
        fibres.seed(threads, seed)
        assert_same(everything(operators, case), expected)


@threads_of_a_block
@pytest.mark.parametrize("rule", TREE_RULES)
def test_order_of_blocks_changes_nothing_in_trees(threads, rule):
    # Several tiles, so that blocks share sums; under traversal several nodes wait at once.
    operators = fibres.operators(threads)
    options = dict(vocab=3 * 16 * threads, filters=False, greedy_rows=False, stray=False)
    case = make_tree_case(3, batch=3, nodes=24, rule=rule, philox=True, **options)
    # A draft like the target, so that something flows into most nodes; of two trees all is drawn.
    target = case.inputs["target_logits"]
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    case.inputs["draft_logits"].copy_(target + 0.5 * noise)
    case.inputs["kinds"][:2] = 1
    expected = case.run(torch.ops.specdec.verify_tree)
    for seed in range(24 if threads == 32 else 3):
        fibres.seed(threads, seed)
        found = VerifyTreeResult(*operators.verify_tree(**case.inputs))
        if seed == 0:
            assert assert_trees_match(found, expected, case) == 0
            expected = found
        assert_same(found, expected)


@threads_of_a_block
def test_order_of_blocks_changes_nothing_in_beams(threads):
    # Several tiles; whichever block of a level comes last decides it.
    inputs = make_inputs(5, batch=3, width=4, gamma=2, vocab=3 * 16 * threads)
    operators = fibres.operators(threads)
    expected = operators.beam_verify(**inputs)
    assert_like(BeamVerifyResult(*expected), specdec_ext.beam_verify(**inputs))
    for seed in range(3):
        fibres.seed(threads, seed)
        assert_same(operators.beam_verify(**inputs), expected)


def test_calls_from_several_python_threads():
    operators = fibres.operators(32)
    cases = [make_case(seed, batch=3, gamma=2, vocab=97, philox=True) for seed in range(6)]
    expected = [everything(operators, case) for case in cases]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            for got, known in zip(
                pool.map(lambda case: everything(operators, case), cases), expected, strict=True
            ):
                assert_same(got, known)


# --------------------------------------------------------------------------------------------------
# What kernels ask for
# --------------------------------------------------------------------------------------------------


def plain(rule, batch=4, gamma=5, vocab=97, **options):
    """Verify without filters."""
    case = make_case(3, batch=batch, gamma=gamma, vocab=vocab, rule=rule, filters=False, **options)
    return lambda: fibres.operators(32).verify(**case.inputs)


@pytest.mark.parametrize("vocab", [3, 97, 20_011])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gamma", [5, 20])
def test_rules_launch_two_or_three_times(rule, gamma, vocab):
    # Without a draft's law, whoever decides draws as well; a race is a pass of its own. top_beta
    # reports logprobs of the raw law, which is two more.
    for draft in ("logits", "probs", "none"):
        call = plain(rule, gamma=gamma, vocab=vocab, draft=draft)
        has_law = draft != "none" and rule in READ_DRAFT_LAW
        expected = 2 + (has_law or rule == "coupled") + 2 * (rule == "top_beta")
        assert fibres.asked_by(32, call).launches == expected


@pytest.mark.parametrize("rule", RULES)
def test_filters_cost_one_launch(rule):
    # They are recognised by the arguments: their values are on the device.
    without = plain(rule)
    case = make_case(3, batch=4, gamma=5, vocab=97, rule=rule, filters=True)
    assert {"top_k", "top_p", "min_p"} <= set(case.inputs)
    asked = fibres.asked_by(32, lambda: fibres.operators(32).verify(**case.inputs))
    assert asked.launches <= fibres.asked_by(32, without).launches + 1


def launches(name, *args, **kwargs):
    return fibres.asked_by(
        32, lambda: getattr(fibres.operators(32), name)(*args, **kwargs)
    ).launches


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_masks_cost_no_launch_and_a_reduced_vocabulary_two(rule, filters):
    def of(**features):
        case = make_case(3, batch=4, vocab=97, rule=rule, filters=filters, **features)
        return launches("verify", **case.inputs)

    assert of(**MASKED) == of()
    reduced = of(draft_vocab=50) + (2 if rule in READ_DRAFT_LAW else 0)
    assert of(**REDUCED) == of(**REDUCED, **MASKED) == reduced


def tree_of(rule, batch=4, nodes=8, vocab=97, **options):
    return make_tree_case(
        3, batch=batch, nodes=nodes, vocab=vocab, rule=rule, philox=True, **options
    ).inputs


@pytest.mark.parametrize("rule", TREE_RULES)
def test_trees_launch_four_times_and_once_more_with_filters(rule):
    filtered = 4 if rule == "greedy" else 5  # the greedy rule reads no filter
    for options in (
        {},
        dict(batch=50, nodes=3),
        dict(nodes=40),
        dict(vocab=5003),
        dict(allowed_mask=torch.full((4, 8, 4), -1, dtype=torch.int32)),
    ):
        assert launches("verify_tree", **tree_of(rule, **options)) == filtered
        assert launches("verify_tree", **tree_of(rule, filters=False, **options)) == 4
    assert launches("verify_tree", **tree_of(rule, raw_logprobs=True)) == filtered + 2
    reduced = tree_of(rule, draft_vocab=50, draft_token_ids=torch.arange(50))
    assert launches("verify_tree", **reduced) == filtered + (2 if rule in READ_DRAFT_LAW else 0)
    assert launches("verify_tree", **tree_of(rule, batch=0)) == 0


def test_launches_of_beams():
    """One to begin, the scan, and one a level."""
    for gamma in (0, 3):
        assert launches("beam_verify", **make_inputs(0, gamma=gamma)) == 3 + gamma
    assert launches("beam_verify", **make_inputs(0, batch=0)) == 0


def test_launches_of_other_operators_under_masks_and_maps():
    logits, seeds = torch.zeros(3, 50), torch.arange(3)
    ids = dict(draft_token_ids=seeds.new_tensor(range(50)))
    noise = dict(seeds=seeds, positions=seeds)
    mask = dict(allowed_mask=torch.full((3, 2), -1, dtype=torch.int32))
    for given in ({}, mask):
        assert launches("row_law", logits, **given) == 2
        for domain in (1, 2, 3):
            assert launches("sample", logits, **noise, domain=domain, **given) == 2
            assert launches("sample", logits, **noise, domain=domain, **given, **ids) == 4
        assert launches("acceptance", logits, logits, **given) == 2
        assert launches("acceptance", logits, logits, **given, **ids) == 4
    # Nothing to do, nothing launched: not even for the map.
    nobody = logits[:0], dict(seeds=seeds[:0], positions=seeds[:0])
    assert launches("sample", nobody[0], **nobody[1], **ids) == 0
    assert launches("acceptance", nobody[0], nobody[0], **ids) == 0


def test_launches_do_not_grow_with_the_batch():
    for rule in RULES:
        few, many = (fibres.asked_by(32, plain(rule, batch=batch)).launches for batch in (1, 50))
        assert few == many > 0


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_no_allocation_of_rows_times_vocabulary(rule, filters):
    batch, gamma, vocab = 2, 3, 151_936
    case = make_case(
        3, batch=batch, gamma=gamma, vocab=vocab, rule=rule, filters=filters, raw_logprobs=True
    )
    asked = fibres.asked_by(32, lambda: fibres.operators(32).verify(**case.inputs))
    assert asked.allocations == 1
    # Not even one byte for each of the rows' entries.
    assert 0 < asked.bytes < batch * (2 * gamma + 1) * vocab / 4


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("rule", TREE_RULES)
def test_trees_allocate_once_and_little(rule, filters):
    batch, nodes, vocab = 1, 4, 151_936
    inputs = tree_of(rule, batch=batch, nodes=nodes, vocab=vocab, filters=filters)
    asked = fibres.asked_by(32, lambda: fibres.operators(32).verify_tree(**inputs))
    assert asked.allocations == 1
    assert 0 < asked.bytes < batch * 2 * nodes * vocab / 4


@pytest.mark.parametrize("name", ["row_law", "sample", "acceptance"])
def test_other_operators_allocate_little(name):
    logits = torch.zeros(3, 151_936)
    arguments = {
        "row_law": (logits,),
        "sample": (logits, torch.zeros(3, dtype=torch.float64)),
        "acceptance": (logits, logits),
    }[name]
    filters = dict(top_k=torch.full((3,), 50), top_p=torch.full((3,), 0.9))
    for params in ({}, filters):
        asked = fibres.asked_by(
            32, lambda p=params: getattr(fibres.operators(32), name)(*arguments, **p)
        )
        assert asked.launches <= 3 and asked.bytes < logits.numel() / 4


@pytest.mark.parametrize("rule", RULES)
def test_scratch_of_masks_races_and_maps(rule):
    # A mask takes none. A race takes 16 bytes a tile; a map 4 bytes an entry and 4 a token.
    batch, gamma, vocab, width = 2, 3, 40_001, 9_000
    tiles = -(-vocab // 512)

    def of(**features):
        case = make_case(3, batch=batch, gamma=gamma, vocab=vocab, rule=rule, **features)
        asked = fibres.asked_by(32, lambda: fibres.operators(32).verify(**case.inputs))
        assert asked.allocations == 1
        return asked.bytes

    plain = of(draft_vocab=width)
    assert of(draft_vocab=width, **MASKED) == plain
    extra = of(draft_vocab=width, draft_token_ids=True) - plain
    if rule in READ_DRAFT_LAW:
        assert 0 <= extra - 4 * (width + vocab) < 4096
    else:
        assert extra == 0
    if rule == "coupled":
        other = make_case(3, batch=batch, gamma=gamma, vocab=vocab, rule="typical", philox=True)
        asked = fibres.asked_by(32, lambda: fibres.operators(32).verify(**other.inputs))
        # It takes no sums of a draw.
        races = 16 * batch * (gamma + 1) * tiles - 8 * batch * tiles
        assert 0 <= plain - asked.bytes - races < 4096


# --------------------------------------------------------------------------------------------------
# Tiles under masks, maps and races
# --------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def a_mask(generator, *shape, vocab):
    """A random mask, its rows anywhere in memory, with bits beyond the vocabulary; as booleans."""
    width = -(-vocab // 32)
    words = torch.randint(-(2**31), 2**31, (*shape, width + 3), generator=generator).int()
    words = words[..., 1 : width + 1]
    bits = words[..., None] >> torch.arange(32) & 1
    return words, bits.flatten(-2)[..., :vocab].bool()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [-9, 0, 1, 45, 133])
@threads_of_a_block
def test_masked_tiles_are_those_of_masked_logits(threads, tail, dtype):
    # Two whole tiles and a bit, misaligned rows; hidden entries hold NaN.
    operators = fibres.operators(threads)
    vocab = 2 * 16 * threads + tail
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(2, 3, vocab + 3, generator=generator).mul(3).to(dtype)[..., 1 : vocab + 1]
    words, allowed = a_mask(generator, 3, vocab=vocab)
    seen = rows.masked_fill(~allowed, torch.nan)
    hidden = rows.masked_fill(~allowed, -torch.inf)
    seeds = torch.arange(3)
    noise = dict(seeds=seeds, positions=seeds)

    def law_and_draws(given, **params):
        return [
            *operators.row_law(given[0], **params),
            *operators.sample(given[0], **noise, **params),
            *operators.sample(given[0], **noise, **params, domain=3),
            operators.acceptance(*given, **params),
        ]

    for params in ({}, dict(top_k=torch.tensor([5, 0, 600]), top_p=torch.tensor([1.0, 0.7, 1.0]))):
        masked = law_and_draws(seen, **params, allowed_mask=words)
        assert_same(masked, law_and_draws(hidden, **params))
    # A draft vocabulary that ends within the mask's last word, or after it.
    for width in (vocab - 1, vocab + 70):
        draft = torch.randn(3, width, generator=generator).to(dtype)
        legal = torch.zeros(3, width, dtype=torch.bool)
        both = min(vocab, width)
        legal[:, :both] = allowed[:, :both]
        got = operators.acceptance(seen[0], draft, allowed_mask=words)
        assert_same([got], [operators.acceptance(hidden[0], draft.masked_fill(~legal, -torch.inf))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [-9, 1, 133])
@threads_of_a_block
def test_tiles_in_token_order(threads, tail, dtype):
    # Residuals and overlaps of a map that is a permutation: those of permuted rows, bit for bit but
    # for the draft's z, which is summed in another order.
    operators = fibres.operators(threads)
    vocab = 2 * 16 * threads + tail
    generator = torch.Generator().manual_seed(vocab)
    target = torch.randn(2, 3, vocab, generator=generator).mul(2).to(dtype)
    draft = torch.randn(2, 2, vocab, generator=generator).mul(2).to(dtype)
    ids = torch.randperm(vocab, generator=generator)
    straight = torch.empty_like(draft)
    straight[..., ids] = draft
    words, _ = a_mask(generator, 2, 3, vocab=vocab)
    tokens = torch.randint(vocab, (2, 2), generator=generator)
    u = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    for mask in ({}, dict(allowed_mask=words)):
        for rule in ("block", "token"):
            given = dict(uniforms=u, rule=rule, full_accept_probs=True, **mask)
            got = operators.verify(target, tokens, draft, draft_token_ids=ids, **given)
            expected = operators.verify(target, tokens, straight, **given)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=2e-6, equal_nan=True)
        first = {k: v[:, 0] for k, v in mask.items()}
        got = operators.acceptance(target[:, 0], draft[:, 0], draft_token_ids=ids, **first)
        expected = operators.acceptance(target[:, 0], straight[:, 0], **first)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


@threads_of_a_block
@pytest.mark.parametrize("rule", ["block", "token"])
def test_an_empty_residual_leaves_the_targets_law(threads, rule):
    # A token was drafted that the target does not have; all other probabilities are equal to the
    # last bit, so that its rejection leaves nothing of p - q, and blocks sum the row once more.
    vocab, batch, drafted = 9001, 8, 4500
    draft = torch.randn(batch, 1, vocab, generator=torch.Generator().manual_seed(1))
    target = draft.clone()
    draft[..., drafted], target[..., drafted] = -60.0, -math.inf
    law = filtered_law(target[:, 0])
    tokens = torch.linspace(0, vocab - 1, batch).long()
    p = law.gather(1, tokens[:, None])[:, 0]
    middle = law.cumsum(1).gather(1, tokens[:, None])[:, 0] - p / 2
    uniforms = torch.stack([torch.zeros_like(middle), middle], 1)
    drafts = torch.full((batch, 1), drafted)
    found, accepted, logprobs, _, status = fibres.operators(threads).verify(
        target.repeat(1, 2, 1), drafts, draft, uniforms=uniforms, rule=rule
    )
    assert accepted.tolist() == status.tolist() == [0] * batch
    assert torch.equal(found[:, 0], tokens)
    torch.testing.assert_close(logprobs[:, 0], p.log().float(), rtol=1e-5, atol=1e-5)


@threads_of_a_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cutoffs_are_the_cpus(threads, dtype):
    # Few and many candidates, one or several threads for each, ties, rows of which a part is -inf,
    # every filter alone and with others: all ways that cutoff.cuh has.
    generator = torch.Generator().manual_seed(3)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    def choice(options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    for _ in range(25):
        vocab = int(10 ** (4 * uniform(1)))
        logits = choice([1.0, 4.0]) * torch.randn(6, vocab, generator=generator)
        if choice([True, False]):
            logits = (2 * logits).round() / 4
        logits[uniform(6, vocab) < choice([0.0, 0.5])] = -math.inf
        given = dict(
            temperature=0.2 + 1.5 * uniform(6),
            top_k=torch.randint(0, choice([10, 80, 400, 13_000]), (6,), generator=generator),
            top_p=uniform(6),
            min_p=choice([1.0, 0.1, 0.001]) * uniform(6),
        )
        given = {name: value for name, value in given.items() if choice([True, True, False])}
        logits = logits.to(dtype)
        got = fibres.operators(threads).row_law(logits, **given)
        expected = torch.ops.specdec.row_law(logits, **given)
        assert_same(got[:3], expected[:3])
        torch.testing.assert_close(got[3], expected[3], rtol=0, atol=2e-6, equal_nan=True)
        assert_same(got[4:], expected[4:])


@threads_of_a_block
def test_trees_among_many(threads):
    # As test_among_many_rows of test_invariance.py; blocks that scan find laws, too.
    case = make_tree_case(9, batch=12, nodes=16, filters=False, philox=True)
    verify_tree = fibres.operators(threads).verify_tree
    alone = verify_tree(**case.inputs)
    order = [7 * k % 12 for k in range(1000)]
    many = verify_tree(**case.select(order).inputs)
    assert_same(many, [output[order] for output in alone])


def test_races_do_not_depend_on_who_takes_which_tiles():
    # 1,400 rows of 3 tiles: a block takes two of them. One row: a block takes one.
    operators = fibres.operators(32)
    table = torch.randn(4, 1100, generator=torch.Generator().manual_seed(1)).bfloat16()
    seeds = torch.arange(4)

    def race(rows):
        return operators.sample(table[rows], seeds=seeds[rows], positions=seeds[rows], domain=3)

    alone = [torch.cat(outputs) for outputs in zip(*(race([k]) for k in range(4)), strict=True)]
    assert_same(race([0, 1, 2, 3] * 350), [output.repeat(350) for output in alone])


# --------------------------------------------------------------------------------------------------
# What kernels reach
# --------------------------------------------------------------------------------------------------


def on_fibres(script, threads):
    """A script of test_memory.py with the operators of this block size."""
    assert "torch.ops.specdec" in script
    operators = f"__import__('fibres').operators({threads})"
    return script.replace("torch.ops.specdec", operators)


@pytest.mark.thorough
@threads_of_a_block
def test_nothing_is_read_beside_the_tensors(run_python, threads):
    done = run_python(on_fibres(FENCED, threads))
    assert done.returncode == 0 and "unharmed" in done.stdout, done.stderr


@pytest.mark.thorough
@threads_of_a_block
def test_offsets_beyond_32_bits(run_python, threads):
    done = run_python(on_fibres(FAR, threads))
    assert done.returncode == 0 and "unharmed" in done.stdout, done.stderr


TABLE = """
import sys, torch
import fibres, specdec_ext
from guard import allocate, at

# Rows of a full-size table, packed one after the other, of which only the ends exist.
operators = fibres.operators(int(sys.argv[1]))
rows, vocab = 30_001, 151_936
assert rows * vocab > 2**32
table = at(allocate(rows * vocab * 2), rows * vocab, torch.bfloat16).view(rows, vocab)
used = torch.tensor([0, 1, rows - 2, rows - 1])
generator = torch.Generator().manual_seed(0)
few = (torch.randn(4, vocab, generator=generator) * 3).bfloat16()
for r, values in zip(used.tolist(), few):
    table[r] = values
which = torch.tensor([[3, 2, 0], [1, 3, 2]])
tokens = few[which][:, :2].float().argmax(2)
u = torch.rand(2, 3, dtype=torch.float64, generator=generator)
filters = dict(top_k=torch.tensor([50, 0]), top_p=torch.tensor([1.0, 0.8]))
for rule in ("block", "token"):
    for options in ({}, filters):
        got, expected = (
            operators.verify(
                rows_of, tokens, rows_of, target_rows=index, draft_rows=index[:, 1:],
                uniforms=u, rule=rule, **options,
            )
            for rows_of, index in ((table, used[which]), (few, which))
        )
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
print("unharmed")
"""


@pytest.mark.thorough
@threads_of_a_block
def test_rows_times_vocabulary_beyond_32_bits(run_python, threads):
    done = run_python(TABLE, str(threads))
    assert done.returncode == 0 and "unharmed" in done.stdout, done.stderr
