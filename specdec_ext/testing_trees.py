"""The tools for trees of `specdec_ext.testing`, under the name that they first had."""

from .testing import (
    NodeAcceptance,
    TreeCase,
    assert_trees_match,
    chain_as_tree,
    draft_trees,
    exact_tree_law,
    explain_tree_outcome,
    make_tree_case,
    nested_acceptance,
    post_order,
)

__all__ = [
    "NodeAcceptance",
    "TreeCase",
    "assert_trees_match",
    "chain_as_tree",
    "draft_trees",
    "exact_tree_law",
    "explain_tree_outcome",
    "make_tree_case",
    "nested_acceptance",
    "post_order",
]
