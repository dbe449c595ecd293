// What test libraries share that Python calls through ctypes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>

#define SPECDEC_TEST extern "C" __attribute__((visibility("default")))

namespace specdec {
namespace fibres {

// Calls run(); what it throws is the message.
template <typename Run>
void say_error(char* message, int64_t size, const Run& run) {
  message[0] = '\0';
  try {
    run();
  } catch (const std::exception& e) {
    snprintf(message, static_cast<size_t>(size), "%s", e.what());
  }
}

}  // namespace fibres
}  // namespace specdec
