// The pybind11 module: host structures that are no tensors, the facts of the build, and what C++
// knows of the contract.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../core/tree.h"
#include "copy_reader.h"
#include "suffix_trie.h"
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

  using specdec::CopyReader;
  using specdec::Growth;
  using specdec::InputMatcher;
  using specdec::SuffixTrie;
  using Tokens = const std::vector<int64_t>&;
  // module_local: a process may hold two builds of this module.
  py::class_<Growth>(m, "Growth", "What a SuffixTrie proposes, level by level.", py::module_local())
      .def_readonly("tokens", &Growth::tokens)
      .def_readonly("parents", &Growth::parents,
                    "An earlier node of each, -1: the end of the context.")
      .def_readonly("survivals", &Growth::survivals,
                    "The estimated probability that a node and its ancestors are accepted.")
      .def_readonly("expected", &Growth::expected, "The sum of all survivals.")
      .def_readonly("text", &Growth::text,
                    "The text in which the first token was seen last; -1: none that is held.");
  py::class_<SuffixTrie>(m, "SuffixTrie",
                         "What followed each piece of up to max_match tokens of some texts, and "
                         "how often.",
                         py::module_local())
      .def(py::init<int64_t>(), py::arg("max_match"))
      .def("append", &SuffixTrie::append, py::arg("tokens"))
      .def("close", &SuffixTrie::close, "End the text that grows; its number.")
      .def("drop", &SuffixTrie::drop, py::arg("number"), "Forget a text that was closed.")
      .def("grow", &SuffixTrie::grow, py::arg("context"), py::kw_only(), py::arg("nodes"),
           py::arg("depth"), py::arg("breadth"), py::arg("min_match"), py::arg("least"),
           py::arg("any_length"),
           "Up to so many tokens that are likely to follow a context, as a tree.")
      .def("__len__", &SuffixTrie::size, "Tokens of all texts that are held.")
      .def_property_readonly("nodes", &SuffixTrie::nodes)
      .def_property_readonly("visits", &SuffixTrie::visits,
                             "Nodes visited so far: what is O(max_match) a token.");
  py::class_<CopyReader>(m, "CopyReader",
                         "Where a text that copies its input in reading order is in it.",
                         py::module_local())
      .def(py::init<>())
      .def("append_input", &CopyReader::append_input, py::arg("tokens"))
      .def("append", &CopyReader::append, py::arg("tokens"))
      .def("copy", &CopyReader::copy, py::kw_only(), py::arg("most"), py::arg("min_match"),
           py::arg("least"), "Up to so many tokens that are likely to come next.")
      .def("__len__", &CopyReader::size)
      .def_property_readonly("match_length", &CopyReader::match)
      .def_property_readonly("source", &CopyReader::source,
                             "The place of the token to copy next; -1: nothing agrees.");
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
