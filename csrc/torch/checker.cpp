#include "checker.h"

#include <sstream>

#include "value_error.h"

namespace specdec {
namespace {

const char* type_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return "a type that no operator takes";
  }
}

bool shape_fits(const Tensor& t, Shape shape) {
  if (t.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t d = 0;
  for (const int64_t size : shape) {
    if (size >= 0 && t.size(d) != size) return false;
    ++d;
  }
  return true;
}

// " = [2, 6]" where every size is known; says what the symbols are in this call.
std::string sizes_known(Shape shape) {
  std::ostringstream out;
  out << " = [";
  const char* separator = "";
  for (const int64_t size : shape) {
    if (size < 0) return "";
    out << separator << size;
    separator = ", ";
  }
  out << "]";
  return out.str();
}

std::string device_name(const Tensor& t) {
  const auto device = t.device();
  const std::string type = device.type() == torch::headeronly::DeviceType::CPU ? "cpu"
                           : device.type() == torch::headeronly::DeviceType::CUDA
                               ? "cuda"
                               : "another device";
  return device.has_index() ? type + ":" + std::to_string(device.index()) : type;
}

template <typename A>
void take_strides(const Tensor& t, A* array) {
  for (int64_t d = 0; d < t.dim() && d < 2; ++d) array->stride[d] = t.stride(d);
}

}  // namespace

std::string describe(const Tensor& tensor) {
  std::ostringstream out;
  out << "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) out << (d > 0 ? ", " : "") << tensor.size(d);
  out << "] " << type_name(tensor.scalar_type());
  return out.str();
}

Element element_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    case ScalarType::Half:
      return Element::kFloat16;
    default:
      return Element::kFloat32;
  }
}

bool is_float8(const Tensor& t) {
  const ScalarType type = t.scalar_type();
  return type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2;
}

void Checker::fail(const std::string& message) const {
  throw pybind11::value_error(std::string(op_) + ": " + message);
}

void Checker::require(bool condition, const std::string& message) const {
  if (!condition) fail(message);
}

void Checker::same_device(const Tensor& t, const char* name) const {
  if (t.device() == first_.device()) return;
  fail(std::string(name) + " must be on " + device_name(first_) + " like the first argument, got " +
       device_name(t));
}

void Checker::expect(const Tensor& t, const char* name, const char* symbols, const char* types,
                     bool type_fits, Shape shape) const {
  if (!type_fits || !shape_fits(t, shape)) {
    fail(std::string(name) + " must be " + symbols + sizes_known(shape) + " " + types + ", got " +
         describe(t));
  }
  same_device(t, name);
}

void Checker::vocabulary(int64_t entries, const std::string& name, const std::string& got) const {
  require(entries >= 1, name + " must have at least one vocabulary entry, got " + got);
  require(entries <= kMaxVocab, name + " must have at most " + std::to_string(kMaxVocab) +
                                    " vocabulary entries, got " + got);
}

void Checker::vocabulary_rows(const Tensor& t, const char* name, const char* symbols,
                              Shape shape) const {
  const ScalarType type = t.scalar_type();
  expect(t, name, symbols, "float32, bfloat16 or float16",
         type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
         shape);
  const int64_t vocab = t.size(t.dim() - 1);
  vocabulary(vocab, name, describe(t));
  unit_stride(t, name, symbols);
}

void Checker::vectors(const Tensor& t, const char* name, const char* symbols, Shape shape) const {
  const ScalarType type = t.scalar_type();
  expect(t, name, symbols, "float32, bfloat16 or float16",
         type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
         shape);
  unit_stride(t, name, symbols);
}

void Checker::cached_vectors(const Tensor& t, const char* name, const char* symbols,
                             Shape shape) const {
  const ScalarType type = t.scalar_type();
  expect(t, name, symbols, "float32, bfloat16, float16, float8_e4m3fn or float8_e5m2",
         type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
             is_float8(t),
         shape);
  unit_stride(t, name, symbols);
}

void Checker::head_factors(const std::optional<Tensor>& t, const char* name, int64_t heads) const {
  if (!t.has_value()) return;
  const bool fits = t->dim() == 0 || (t->dim() == 1 && (t->size(0) == 1 || t->size(0) == heads));
  require(fits && t->scalar_type() == ScalarType::Float,
          std::string(name) + " must be [Hkv] = [" + std::to_string(heads) +
              "], [1] or [] float32, got " + describe(*t));
  same_device(*t, name);
}

void Checker::cache(const Tensor& t, const char* name) const {
  const auto bytes = static_cast<int64_t>(t.element_size());
  require((t.dim() == 4 || t.dim() == 5) && (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8),
          std::string(name) +
              " must be [B, L, H, D] or [Y, B, L, H, D] of 1, 2, 4 or 8 bytes an element, got " +
              describe(t));
  for (int64_t d = 0; d < t.dim(); ++d) {
    require(t.size(d) <= 1 || t.stride(d) != 0 || t.numel() == 0,
            std::string(name) +
                " is written to and must not overlap itself, got stride 0 for the " +
                std::to_string(t.size(d)) + " entries of dimension " + std::to_string(d));
  }
  same_device(t, name);
}

void Checker::words(const Tensor& t, const char* name, const char* symbols, Shape shape) const {
  expect(t, name, symbols, "int32", t.scalar_type() == ScalarType::Int, shape);
  require(t.size(t.dim() - 1) >= 1,
          std::string(name) + " must have at least one word, got " + describe(t));
  unit_stride(t, name, symbols);
}

void Checker::unit_stride(const Tensor& t, const char* name, const char* symbols) const {
  const int64_t stride = t.stride(t.dim() - 1);
  require(t.size(t.dim() - 1) == 1 || stride == 1,
          std::string(name) + " must be " + symbols +
              " with unit stride on the last dimension, got stride " + std::to_string(stride));
}

IdArray Checker::ids(const std::optional<Tensor>& t, const char* name, const char* symbols,
                     Shape shape) const {
  IdArray array;
  if (!t.has_value()) return array;
  const ScalarType type = t->scalar_type();
  expect(*t, name, symbols, "int32 or int64", type == ScalarType::Int || type == ScalarType::Long,
         shape);
  array.data = t->const_data_ptr();
  array.is_int64 = type == ScalarType::Long;
  take_strides(*t, &array);
  return array;
}

IdArray Checker::listed_ids(const Tensor& t, const char* name, const char* symbols,
                            Shape shape) const {
  const IdArray array = ids(t, name, symbols, shape);
  unit_stride(t, name, symbols);
  return array;
}

template <typename T>
Array<T> Checker::array(const std::optional<Tensor>& t, const char* name, const char* symbols,
                        const char* type_name, ScalarType type, Shape shape) const {
  Array<T> array;
  if (!t.has_value()) return array;
  expect(*t, name, symbols, type_name, t->scalar_type() == type, shape);
  array.data = static_cast<const T*>(t->const_data_ptr());
  take_strides(*t, &array);
  return array;
}

Array<float> Checker::floats(const std::optional<Tensor>& t, const char* name, Shape shape) const {
  return floats(t, name, "[B]", shape);
}

Array<float> Checker::floats(const std::optional<Tensor>& t, const char* name, const char* symbols,
                             Shape shape) const {
  return array<float>(t, name, symbols, "float32", ScalarType::Float, shape);
}

Array<double> Checker::doubles(const std::optional<Tensor>& t, const char* name,
                               const char* symbols, Shape shape) const {
  return array<double>(t, name, symbols, "float64", ScalarType::Double, shape);
}

Array<int64_t> Checker::longs(const std::optional<Tensor>& t, const char* name, Shape shape) const {
  return array<int64_t>(t, name, "[B]", "int64", ScalarType::Long, shape);
}

void Checker::bit_words(const Tensor& t, const char* name, const char* symbols, Shape shape) const {
  expect(t, name, symbols, "int64", t.scalar_type() == ScalarType::Long, shape);
}

Array<int8_t> Checker::bytes(const std::optional<Tensor>& t, const char* name, const char* symbols,
                             Shape shape) const {
  return array<int8_t>(t, name, symbols, "int8", ScalarType::Char, shape);
}

void Checker::in_range(const char* name, int64_t value, int64_t low, int64_t high) const {
  require(value >= low && value < high, std::string(name) + " must be in [" + std::to_string(low) +
                                            ", " + std::to_string(high) + "), got " +
                                            std::to_string(value));
}

}  // namespace specdec
