// The exception that Python sees as ValueError.
//
// torch 2.13 lets pybind11 translate what an operator throws, and a ValueError comes of
// std::invalid_argument. torch 2.15 translates by itself, and a RuntimeError comes of everything
// but torch's own exceptions and pybind11's. Those of torch are not in its stable ABI, so this is
// one of pybind11's, which calls set_error on the way to Python. It is declared here as pybind11
// declares it, since with pybind11's headers the library could not be loaded without Python.
#pragma once

#include <stdexcept>

extern "C" {
// Of Python's stable ABI; null in a process without Python.
__attribute__((weak)) extern struct _object* PyExc_ValueError;
__attribute__((weak)) void PyErr_SetString(struct _object* type, const char* message);
}

namespace pybind11 {

// As in pybind11's own headers: what is caught as such a class is told by the class's name.
class builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};

class value_error : public builtin_exception {
 public:
  using builtin_exception::builtin_exception;
  void set_error() const override { PyErr_SetString(PyExc_ValueError, what()); }
};

}  // namespace pybind11
