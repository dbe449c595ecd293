// The pybind11 module: host structures that are no tensors, the facts of the build, and what C++
// knows of the contract.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../core/tree.h"
#include "text_search.h"

namespace py = pybind11;

namespace {

// "avx512,avx2,baseline" as a list.
py::list split(const py::str& names) { return names.attr("split")(","); }

py::dict build_info() {
  using py::literals::operator""_a;
  return py::dict(
      "compiler"_a = SPECDEC_COMPILER, "cxx_standard"_a = __cplusplus / 100 % 100,
      "build_type"_a = SPECDEC_BUILD_TYPE, "cpu_variants"_a = split(SPECDEC_CPU_VARIANTS),
      "cuda_compiler"_a = SPECDEC_CUDA_COMPILER, "cuda_left_out"_a = SPECDEC_CUDA_LEFT_OUT,
      "torch"_a = SPECDEC_TORCH_VERSION, "torch_cuda"_a = SPECDEC_TORCH_CUDA_VERSION);
}

// The facts that specdec_ext/contract.py has, too, under its names.
py::dict contract() {
  using namespace specdec;
  using py::literals::operator""_a;
  const auto number = [](auto value) { return static_cast<int64_t>(value); };
  py::list rules;
  for (const NamedRule& r : kRules) {
    const auto has = [&](Trait trait) { return (r.traits & trait) != 0; };
    rules.append(py::dict("name"_a = r.name, "chains"_a = has(kChains), "trees"_a = has(kTrees),
                          "lossless"_a = has(kLossless), "reads_draft_law"_a = has(kReadsDraftLaw),
                          "takes_coins"_a = has(kTakesCoins), "races"_a = has(kRaces),
                          "stepwise"_a = has(kStepwise), "raw_logprobs"_a = has(kRawLogprobs)));
  }
  return py::dict(
      "rules"_a = rules, "GREEDY_BELOW"_a = kGreedyTemperature,
      "STATUS_NO_TARGET_LAW"_a = number(kNoTargetLaw),
      "STATUS_INVALID_DRAFT_TOKEN"_a = number(kInvalidDraftToken),
      "STATUS_NO_DRAFT_LAW"_a = number(kNoDraftLaw),
      "STATUS_PARAMETER_OUT_OF_RANGE"_a = number(kParameterOutOfRange),
      "STATUS_INVALID_TREE"_a = number(kInvalidTree),
      "KIND_DETERMINISTIC"_a = number(ChildKind::kDeterministic),
      "KIND_IID"_a = number(ChildKind::kIid),
      "KIND_WITHOUT_REPLACEMENT"_a = number(ChildKind::kWithoutReplacement),
      "KIND_REST"_a = number(ChildKind::kRest), "DOMAIN_ACCEPT"_a = number(Domain::kAccept),
      "DOMAIN_RESIDUAL"_a = number(Domain::kResidual), "DOMAIN_DRAFT"_a = number(Domain::kDraft),
      "DOMAIN_COUPLED"_a = number(Domain::kCoupled));
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host structures of specdec_ext.";
  m.def("build_info", &build_info,
        "What this build was made with: compilers, C++ standard, build type, CPU variants, torch; "
        "and why it has no CUDA kernels, empty if it has them.");

  m.def("contract", &contract,
        "The rules, status bits, kinds, domains and the greedy threshold as C++ has them.");

  using specdec::InputMatcher;
  using specdec::RepeatFinder;
  using Tokens = const std::vector<int64_t>&;
  // module_local: a process may hold two builds of this module.
  py::class_<RepeatFinder>(m, "RepeatFinder",
                           "The longest suffix of a growing text that occurred in it before.",
                           py::module_local())
      .def(py::init<int64_t>(), py::arg("max_match"))
      .def("append", &RepeatFinder::append, py::arg("tokens"))
      .def("continuation", &RepeatFinder::continuation, py::arg("count"), py::arg("min_match"),
           "Up to count tokens that came after the match's latest occurrence, if the match has "
           "min_match tokens.")
      .def("__len__", &RepeatFinder::size)
      .def_property_readonly("match_length", &RepeatFinder::match_length)
      .def_property_readonly("match_end", &RepeatFinder::match_end,
                             "Index of the latest occurrence's last token; -1: no match.")
      .def_property_readonly("visits", &RepeatFinder::visits,
                             "States visited so far: what is O(1) a token.");
  py::class_<InputMatcher>(m, "InputMatcher",
                           "The longest suffix of a growing output that occurs in an input.",
                           py::module_local())
      .def(py::init<Tokens>(), py::arg("input"))
      .def("append", &InputMatcher::append, py::arg("tokens"))
      .def_property_readonly("match_length", &InputMatcher::match_length)
      .def_property_readonly("unique_end", &InputMatcher::unique_end,
                             "Index of the match's last token if it occurs once, else -1.")
      .def_property_readonly("visits", &InputMatcher::visits,
                             "States visited so far: what is O(1) a token.");
}
