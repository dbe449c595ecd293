// Makes operators of their two halves: the check that builds an operator's parameters and a
// backend's kernel that runs on them. The parameter list is that of the check, which is that of the
// schema (csrc/library.cpp).
#pragma once

#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "arguments.h"

// The namespace of the operators. torch ends the process where one operator is defined twice:
// builds that are to be loaded beside others have a name of their own (CMakeLists.txt, `hub`), and
// so have the tests' kernels (csrc/testing).
#ifndef SPECDEC_NAMESPACE
#define SPECDEC_NAMESPACE specdec
#endif

// Its name as text.
#define SPECDEC_TEXT_OF(name) #name
#define SPECDEC_TEXT(name) SPECDEC_TEXT_OF(name)

// torch's macros glue their arguments into names, so SPECDEC_NAMESPACE has to be expanded first.
#define SPECDEC_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define SPECDEC_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

namespace specdec {

// How many arguments of the schema a check's parameter stands for: one, or those of a group.
template <typename T>
uint64_t count_arguments() {
  uint64_t count = 1;
  if constexpr (is_group<T>) {
    count = 0;
    T().each([&](auto&) { ++count; });
  }
  return count;
}

// Takes a parameter of a check from torch's stack and moves on.
template <typename T>
T take(StableIValue** stack) {
  if constexpr (is_group<T>) {
    T group;
    group.each([&](auto& member) { member = take<std::decay_t<decltype(member)>>(stack); });
    return group;
  } else {
    return torch::stable::detail::to<T>(*(*stack)++);
  }
}

inline void require_count(const char* what, uint64_t schema, uint64_t check) {
  if (schema == check) return;
  throw std::logic_error("the schema has " + std::to_string(schema) + " " + what +
                         ", its check has " + std::to_string(check));
}

inline void put_outputs(const Tensor& output, StableIValue* stack, uint64_t count) {
  require_count("outputs", count, 1);
  stack[0] = torch::stable::detail::from(output);
}

template <typename... Tensors>
void put_outputs(const std::tuple<Tensors...>& outputs, StableIValue* stack, uint64_t count) {
  require_count("outputs", count, sizeof...(Tensors));
  std::apply(
      [&](const Tensors&... output) {
        uint64_t i = 0;
        ((stack[i++] = torch::stable::detail::from(output)), ...);
      },
      outputs);
}

// Run(const Call&) enqueues or runs the kernels.
template <auto Check, auto Run>
struct Operator;

template <typename Call, typename... Parameters, Call (*Check)(Parameters...), auto Run>
struct Operator<Check, Run> {
  // What TORCH_BOX makes of a function, for one that takes groups of arguments.
  static void boxed(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
    static const uint64_t expected = (count_arguments<std::decay_t<Parameters>>() + ...);
    require_count("arguments", num_arguments, expected);
    StableIValue* next = stack;
    // They stay alive in this frame while the kernel reads them through plain pointers.
    const std::tuple<std::decay_t<Parameters>...> arguments{
        take<std::decay_t<Parameters>>(&next)...};
    const Call call = std::apply(Check, arguments);
    Run(call);
    put_outputs(call.outputs, stack, num_outputs);
  }
};

}  // namespace specdec
