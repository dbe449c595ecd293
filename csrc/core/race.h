// Exponential races (Daliri, Musco, Suresh 2024): every token has a noise E, and the one with the
// least E / p(x) wins. It is a sample of p; laws that share the noise share most of their winners.
#pragma once

#include <cmath>

#include "params.h"
#include "philox.h"

namespace specdec {

// Which noise a row races with: that of an absolute position, so that whoever asks for a token at
// that position, with whatever draft, meets the same noise.
struct Race {
  uint64_t seed;
  uint64_t position;
  uint32_t stream;
};

// An entry's time to the finish; entry == -1: nobody yet.
struct Runner {
  double time = INFINITY;
  int64_t entry = -1;
};

namespace SPECDEC_CPU_ISA {

// `offset` positions after that of the call.
SPECDEC_HD Race race_of(const Randomness& r, int64_t b, int64_t offset) {
  return {static_cast<uint64_t>(r.seeds.data[b * r.seeds.stride[0]]),
          static_cast<uint64_t>(r.positions.data[b * r.positions.stride[0]]) +
              static_cast<uint64_t>(offset),
          r.stream};
}

// The counter that two neighbouring tokens share.
SPECDEC_HD PhiloxWords race_counter(const Race& race, uint32_t pair) {
  return {{pair, static_cast<uint32_t>(race.position), static_cast<uint32_t>(race.position >> 32),
           static_cast<uint32_t>(Domain::kCoupled) << 16 | race.stream << 24}};
}

// E = -log1p(-u) with u of 64 bits: near 0 it keeps full precision, so that unlikely tokens win at
// their true rate. float64 rounds the largest u to 1, where E would be infinite.
SPECDEC_HD double exponential_noise(uint64_t w) {
  const double u = (static_cast<double>(w) + 0.5) * 0x1p-64;
  return -log1p(-(u < 1.0 ? u : 1.0 - 0x1p-53));
}

SPECDEC_HD double race_noise(const Race& race, int64_t token) {
  const PhiloxWords words =
      philox4x32_10(race.seed, race_counter(race, static_cast<uint32_t>(token >> 1)));
  // No index that a compiler does not know: that would move the words from registers to memory.
  const bool odd = (token & 1) != 0;
  const uint64_t high = odd ? words.word[3] : words.word[1];
  return exponential_noise(high << 32 | (odd ? words.word[2] : words.word[0]));
}

// Whether `a` comes in before `b`; the lower entry does if both arrive at once.
SPECDEC_HD bool comes_before(const Runner& a, const Runner& b) {
  return a.time < b.time || (a.time == b.time && a.entry >= 0 && a.entry < b.entry);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
