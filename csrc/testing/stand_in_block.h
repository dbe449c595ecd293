// The collectives of csrc/cuda/block.cuh on fibres. Each is one meeting of all threads concerned,
// in which the last to arrive combines the values in thread order.
#pragma once

#include <cstdint>

#include "stand_in.h"

namespace specdec {
namespace fibres {

struct Sum {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};

struct Largest {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

struct Smallest {
  template <typename T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

template <typename T, typename Op>
void reduce(void** brought, int n) {
  T total = *static_cast<T*>(brought[0]);
  for (int i = 1; i < n; ++i) total = Op{}(total, *static_cast<T*>(brought[i]));
  for (int i = 0; i < n; ++i) *static_cast<T*>(brought[i]) = total;
}

struct Prefix {
  uint64_t value;
  uint64_t total;
};

inline void exclusive_sum(void** brought, int n) {
  uint64_t sum = 0;
  for (int i = 0; i < n; ++i) {
    auto* prefix = static_cast<Prefix*>(brought[i]);
    const uint64_t value = prefix->value;
    prefix->value = sum;
    sum += value;
  }
  for (int i = 0; i < n; ++i) static_cast<Prefix*>(brought[i])->total = sum;
}

}  // namespace fibres

namespace cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

template <typename T>
T warp_sum(T value, fibres::Site site = fibres::here("warp_sum")) {
  fibres::meet_warp(kAllLanes, site, fibres::reduce<T, fibres::Sum>, &value);
  return value;
}

template <typename T>
T warp_max(T value, fibres::Site site = fibres::here("warp_max")) {
  fibres::meet_warp(kAllLanes, site, fibres::reduce<T, fibres::Largest>, &value);
  return value;
}

template <typename T>
T warp_min(T value, fibres::Site site = fibres::here("warp_min")) {
  fibres::meet_warp(kAllLanes, site, fibres::reduce<T, fibres::Smallest>, &value);
  return value;
}

template <typename T>
T block_sum(T value, fibres::Site site = fibres::here("block_sum")) {
  fibres::meet_block(site, fibres::reduce<T, fibres::Sum>, &value);
  return value;
}

template <typename T>
T block_max(T value, fibres::Site site = fibres::here("block_max")) {
  fibres::meet_block(site, fibres::reduce<T, fibres::Largest>, &value);
  return value;
}

template <typename T>
T block_min(T value, fibres::Site site = fibres::here("block_min")) {
  fibres::meet_block(site, fibres::reduce<T, fibres::Smallest>, &value);
  return value;
}

inline bool block_all(bool value, fibres::Site site = fibres::here("block_all")) {
  return fibres::vote_block(value, site).all;
}

inline bool block_any(bool value, fibres::Site site = fibres::here("block_any")) {
  return fibres::vote_block(value, site).any;
}

inline uint64_t block_exclusive_sum(uint64_t value, uint64_t* total,
                                    fibres::Site site = fibres::here("block_exclusive_sum")) {
  fibres::Prefix prefix{value, 0};
  fibres::meet_block(site, fibres::exclusive_sum, &prefix);
  *total = prefix.total;
  return prefix.value;
}

}  // namespace cuda
}  // namespace specdec
