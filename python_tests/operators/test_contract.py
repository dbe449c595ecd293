"""The contract: traits of the rules, as a literal table, and who has to know the same rules."""

import re

import pytest
import torch

import specdec_ext
from specdec_ext import _host, contract, ops, reference
from specdec_ext.contract import rule_names

# What papers and docs/design.md say of each rule; written out: no trait changes by accident.
TRAITS = {
    #              chains trees  lossless reads_q coins  races  stepwise raw
    "block":       (True,  False, True,    True,   True,  False, False,   False),
    "token":       (True,  False, True,    True,   True,  False, True,    False),
    "traversal":   (False, True,  True,    True,   True,  False, False,   False),
    "recursive":   (False, True,  True,    True,   True,  False, True,    False),
    "target_only": (False, True,  True,    False,  True,  False, True,    False),
    "greedy":      (True,  True,  True,    False,  False, False, True,    False),
    "lenient":     (True,  False, False,   True,   True,  False, True,    False),
    "top_beta":    (True,  False, False,   False,  False, False, True,    True),
    "typical":     (True,  False, False,   False,  True,  False, True,    False),
    "coupled":     (True,  True,  True,    False,  False, True,  True,    False),
}  # fmt: skip
CPP = _host.contract()
NAMES = (
    *("chains", "trees", "lossless", "reads_draft_law", "takes_coins", "races", "stepwise"),
    "raw_logprobs",
)


def test_every_rule_has_these_traits():
    assert contract.Rule._fields == ("name", *NAMES)
    assert {name: rule[1:] for name, rule in contract.RULES.items()} == TRAITS
    assert all(rule.name == name for name, rule in contract.RULES.items())


def test_cpp_has_the_same_rules():
    assert CPP["rules"] == [rule._asdict() for rule in contract.RULES.values()]


@pytest.mark.parametrize("name", sorted(CPP.keys() - {"rules"}))
def test_cpp_has_the_same_number(name):
    assert CPP[name] == getattr(contract, name)


def test_cpp_says_every_number():
    numbers = {n for n in contract.__all__ if isinstance(getattr(contract, n), (int, float))}
    assert CPP.keys() == {"rules", *numbers} - {"KIND_SAMPLED"}
    # In csrc a chain's token is sampled where its kind is not 0; trees name the kinds.
    assert contract.KIND_SAMPLED == contract.KIND_IID == 1


def test_rules_without_coins_and_races_ignore_temperature_and_filters():
    assert rule_names(ignores_sampling=True) == ("greedy", "top_beta")


def test_an_unknown_trait_is_refused():
    with pytest.raises(AttributeError, match="losless"):
        rule_names(losless=True)


def test_names_of_rules_are_those_of_the_operators():
    assert ops.RULES == contract.CHAIN_RULES
    assert ops.TREE_RULES == contract.TREE_RULES
    assert tuple(reference.RULES) == contract.CHAIN_RULES
    assert set(reference.TREE_RULES) == set(contract.TREE_RULES)


@pytest.mark.parametrize("op", ["verify", "verify_tree"])
def test_operators_list_these_rules_when_they_meet_another(op):
    """C++ has a table of its own."""
    rules = contract.CHAIN_RULES if op == "verify" else contract.TREE_RULES
    logits, tokens = torch.zeros(1, 1, 3), torch.zeros(1, 0 if op == "verify" else 1).long()
    given = (logits, tokens) if op == "verify" else (logits, tokens, tokens - 1)
    with pytest.raises(ValueError, match="rule must be one of") as failure:
        getattr(specdec_ext, op)(*given, rule="none")
    listed = ", ".join(f'"{name}"' for name in rules)
    assert f'{op}: rule must be one of {listed}, got "none"' in str(failure.value)


def test_public_import_paths_stay():
    for name in (
        *("VerifyResult", "VerifyTreeResult", "SampleResult", "RowLaw", "TreeMaskResult"),
        *(name for name in contract.__all__ if name.startswith("STATUS_")),
    ):
        assert getattr(ops, name) is getattr(contract, name), name
        assert getattr(specdec_ext, name) is getattr(contract, name), name
    assert (reference.ACCEPT, reference.RESIDUAL, reference.DRAFT, reference.COUPLED) == (
        0,
        1,
        2,
        3,
    )


@pytest.mark.parametrize("op, rules", [("verify", "chains"), ("verify_tree", "trees")])
def test_docstrings_describe_every_rule(op, rules):
    _, *bullets = re.split(r"\n    - ``(?=\w+``)", getattr(specdec_ext, op).__doc__)
    described = {text.split("``")[0]: text for text in bullets}
    assert tuple(described) == rule_names(**{rules: True})
    called = {name for name, text in described.items() if "Not lossless" in text.split("\n\n")[0]}
    assert called == set(rule_names(**{rules: True}, lossless=False))
