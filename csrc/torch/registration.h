// Makes operators of their two halves: the check that builds an operator's parameters and a
// backend's kernel that runs on them. The parameter list is that of the check, written once.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <utility>

#include "arguments.h"

// The namespace of the operators. Tests register the same schemas and checks once more, with other
// kernels behind them, under another name: see csrc/testing.
#ifndef SPECDEC_NAMESPACE
#define SPECDEC_NAMESPACE specdec
#endif

// torch's macros glue their arguments into names, so SPECDEC_NAMESPACE has to be expanded first.
#define SPECDEC_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define SPECDEC_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

namespace specdec {

template <auto Check, auto Run>
struct Operator;

template <typename Call, typename... Args, Call (*Check)(Args...), auto Run>
struct Operator<Check, Run> {
  static auto run(Args... args) {
    // The arguments stay alive in this frame while the kernel reads them through plain pointers.
    Call call = Check(args...);
    Run(call);
    return std::move(call.outputs);
  }
};

// Backend::verify(const VerifyCall&) and so on enqueue or run the kernels.
template <typename Backend>
void implement_operators(torch::stable::detail::StableLibrary& m, const std::string& prefix = "") {
  const auto name = [&](const char* op) { return prefix + op; };
  m.impl(name("row_law").c_str(), TORCH_BOX((&Operator<check_row_law, Backend::row_law>::run)));
  m.impl(name("sample").c_str(), TORCH_BOX((&Operator<check_sample, Backend::sample>::run)));
  m.impl(name("verify").c_str(), TORCH_BOX((&Operator<check_verify, Backend::verify>::run)));
  m.impl(name("verify_tree").c_str(),
         TORCH_BOX((&Operator<check_verify_tree, Backend::verify_tree>::run)));
  m.impl(name("acceptance").c_str(),
         TORCH_BOX((&Operator<check_acceptance, Backend::acceptance>::run)));
  m.impl(name("uniforms").c_str(), TORCH_BOX((&Operator<check_uniforms, Backend::uniforms>::run)));
  m.impl(name("tree_mask").c_str(),
         TORCH_BOX((&Operator<check_tree_mask, Backend::tree_mask>::run)));
  m.impl(name("compact_kv").c_str(),
         TORCH_BOX((&Operator<check_compact_kv, Backend::compact_kv>::run)));
}

}  // namespace specdec
