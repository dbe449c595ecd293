// Philox4x32-10 (Salmon et al., SC 2011) and the counter layout of docs/design.md, "Randomness":
// the same bits on every backend.
#pragma once

#include "platform.h"

namespace specdec {

// Which use of randomness a counter belongs to. Two uses never share a domain: a coin that also
// chose the draft token, or the residual token, would bias the emitted law.
enum class Domain : uint32_t { kAccept = 0, kResidual = 1, kDraft = 2, kCoupled = 3 };

struct PhiloxWords {
  uint32_t word[4];
};

namespace SPECDEC_CPU_ISA {

SPECDEC_HD PhiloxWords philox4x32_10(uint64_t key, PhiloxWords counter) {
  uint32_t key_low = static_cast<uint32_t>(key);
  uint32_t key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t odd = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(odd >> 32) ^ counter.word[1] ^ key_low,
                static_cast<uint32_t>(odd),
                static_cast<uint32_t>(even >> 32) ^ counter.word[3] ^ key_high,
                static_cast<uint32_t>(even)}};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// Counter (0, position low, position high, index | domain << 16 | stream << 24), key = seed.
SPECDEC_HD PhiloxWords counter_words(int64_t seed, int64_t position, Domain domain, uint32_t index,
                                     uint32_t stream) {
  const uint64_t p = static_cast<uint64_t>(position);
  const uint32_t last = index | static_cast<uint32_t>(domain) << 16 | stream << 24;
  return philox4x32_10(static_cast<uint64_t>(seed),
                       {{0, static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), last}});
}

// 53 random bits in [0, 1), from the first pair of words.
SPECDEC_HD double counter_uniform(int64_t seed, int64_t position, Domain domain, uint32_t index,
                                  uint32_t stream) {
  const PhiloxWords words = counter_words(seed, position, domain, index, stream);
  const uint64_t w = static_cast<uint64_t>(words.word[1]) << 32 | words.word[0];
  return static_cast<double>(w >> 11) * 0x1p-53;
}

// Slot of verify's [B, G+1] uniforms: the coin of draft token slot + 1, or the final draw.
SPECDEC_HD double verify_uniform(int64_t seed, int64_t position, int64_t slot, int64_t gamma,
                                 uint32_t stream) {
  return slot < gamma ? counter_uniform(seed, position, Domain::kAccept,
                                        static_cast<uint32_t>(slot + 1), stream)
                      : counter_uniform(seed, position, Domain::kResidual, 0, stream);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
