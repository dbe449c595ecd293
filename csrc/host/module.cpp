// The pybind11 module: host structures that are no tensors, and the facts of the build.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host structures of specdec_ext.";
  m.def("build_info", &build_info,
        "What this build was made with: compilers, C++ standard, build type, CPU variants, torch; "
        "and why it has no CUDA kernels, empty if it has them.");

  using specdec::InputMatcher;
  using specdec::RepeatFinder;
  using Tokens = const std::vector<int64_t>&;
  py::class_<RepeatFinder>(m, "RepeatFinder",
                           "The longest suffix of a growing text that occurred in it before.")
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
                           "The longest suffix of a growing output that occurs in an input.")
      .def(py::init<Tokens>(), py::arg("input"))
      .def("append", &InputMatcher::append, py::arg("tokens"))
      .def_property_readonly("match_length", &InputMatcher::match_length)
      .def_property_readonly("unique_end", &InputMatcher::unique_end,
                             "Index of the match's last token if it occurs once, else -1.")
      .def_property_readonly("visits", &InputMatcher::visits,
                             "States visited so far: what is O(1) a token.");
}
