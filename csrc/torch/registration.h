// Makes an operator of its two halves: the check that builds its parameters and the kernel that
// runs on them. The operator's parameter list is that of the check, written once.
#pragma once

#include <torch/csrc/stable/library.h>

#include <utility>

namespace specdec {

template <auto Check, auto Run>
struct Operator;

template <typename Call, typename... Args, Call (*Check)(Args...), auto Run>
struct Operator<Check, Run> {
  static auto run(Args... args) {
    // The arguments stay alive in this frame while the kernel reads them through plain pointers.
    Call call = Check(args...);
    Run(call.params);
    return std::move(call.outputs);
  }
};

}  // namespace specdec
