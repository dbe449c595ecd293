// Checks of single arguments, with messages that say what was expected and what came.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "../core/params.h"

namespace specdec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A shape in which -1 stands for any size.
using Shape = std::initializer_list<int64_t>;

// "[2, 3] float32", for messages.
std::string describe(const Tensor& tensor);

// Checks the arguments of one operator call. `symbols` is the shape as documentation writes it:
// "[B, G]".
class Checker {
 public:
  // All tensors must be on the device of `first`.
  Checker(const char* op, const Tensor& first) : op_(op), first_(first) {}

  [[noreturn]] void fail(const std::string& message) const;
  void require(bool condition, const std::string& message) const;

  // The size of a vocabulary; `got` says what came.
  void vocabulary(int64_t entries, const std::string& name, const std::string& got) const;

  // A floating-point tensor over a vocabulary: the last dimension must have unit stride.
  void vocabulary_rows(const Tensor& t, const char* name, const char* symbols, Shape shape) const;

  // An int32 tensor of bit masks: the last dimension must have unit stride.
  void words(const Tensor& t, const char* name, const char* symbols, Shape shape) const;

  // A floating-point tensor of vectors: the last dimension must have unit stride.
  void vectors(const Tensor& t, const char* name, const char* symbols, Shape shape) const;

  // The same of the types that are cached: those, and those of 8 bits.
  void cached_vectors(const Tensor& t, const char* name, const char* symbols, Shape shape) const;

  // An optional float32 factor of each head, or one for all.
  void head_factors(const std::optional<Tensor>& t, const char* name, int64_t heads) const;

  // A cache [B, L, H, D], or [Y, B, L, H, D], of any type of 1, 2, 4 or 8 bytes, to be written to.
  void cache(const Tensor& t, const char* name) const;

  // Optional arguments come back as empty arrays where absent.
  IdArray ids(const std::optional<Tensor>& t, const char* name, const char* symbols,
              Shape shape) const;
  IdArray listed_ids(const Tensor& t, const char* name, const char* symbols, Shape shape) const;
  Array<float> floats(const std::optional<Tensor>& t, const char* name, Shape shape) const;
  Array<float> floats(const std::optional<Tensor>& t, const char* name, const char* symbols,
                      Shape shape) const;
  Array<double> doubles(const std::optional<Tensor>& t, const char* name, const char* symbols,
                        Shape shape) const;
  Array<int64_t> longs(const std::optional<Tensor>& t, const char* name, Shape shape) const;
  void bit_words(const Tensor& t, const char* name, const char* symbols, Shape shape) const;
  Array<int8_t> bytes(const std::optional<Tensor>& t, const char* name, const char* symbols,
                      Shape shape) const;

  void in_range(const char* name, int64_t value, int64_t low, int64_t high) const;

 private:
  void unit_stride(const Tensor& t, const char* name, const char* symbols) const;
  void same_device(const Tensor& t, const char* name) const;
  void expect(const Tensor& t, const char* name, const char* symbols, const char* types,
              bool type_fits, Shape shape) const;

  template <typename T>
  Array<T> array(const std::optional<Tensor>& t, const char* name, const char* symbols,
                 const char* type_name, ScalarType type, Shape shape) const;

  const char* op_;
  const Tensor& first_;
};

Element element_of(const Tensor& t);

bool is_float8(const Tensor& t);

}  // namespace specdec
