// The pybind11 module: host structures that are no tensors. Today, the facts of the build.
#include <pybind11/pybind11.h>

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
}
