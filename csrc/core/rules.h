// The verification rules and what sets them apart: the twin of the table in
// specdec_ext/contract.py, which python_tests/operators/test_contract.py compares with this one.
#pragma once

#include <cstdint>

namespace specdec {

// What a rule can have, a bit each; contract.py says what they mean.
enum Trait : uint32_t {
  kChains = 1 << 0,
  kTrees = 1 << 1,
  kLossless = 1 << 2,
  kReadsDraftLaw = 1 << 3,
  kTakesCoins = 1 << 4,
  kRaces = 1 << 5,
  kStepwise = 1 << 6,
  kRawLogprobs = 1 << 7,
};

// RULE(name in C++, name in Python, traits) for every rule.
#define SPECDEC_RULES(RULE)                                                                    \
  RULE(kBlock, "block", kChains | kLossless | kReadsDraftLaw | kTakesCoins)                    \
  RULE(kToken, "token", kChains | kLossless | kReadsDraftLaw | kTakesCoins | kStepwise)        \
  RULE(kTraversal, "traversal", kTrees | kLossless | kReadsDraftLaw | kTakesCoins)             \
  RULE(kRecursive, "recursive", kTrees | kLossless | kReadsDraftLaw | kTakesCoins | kStepwise) \
  RULE(kTargetOnly, "target_only", kTrees | kLossless | kTakesCoins | kStepwise)               \
  RULE(kGreedy, "greedy", kChains | kTrees | kLossless | kStepwise)                            \
  RULE(kLenient, "lenient", kChains | kReadsDraftLaw | kTakesCoins | kStepwise)                \
  RULE(kTopBeta, "top_beta", kChains | kStepwise | kRawLogprobs)                               \
  RULE(kTypical, "typical", kChains | kTakesCoins | kStepwise)                                 \
  RULE(kCoupled, "coupled", kChains | kTrees | kLossless | kRaces | kStepwise)

#define SPECDEC_RULE(id, name, traits) id,
enum class Rule : int8_t { SPECDEC_RULES(SPECDEC_RULE) };
#undef SPECDEC_RULE

struct NamedRule {
  Rule rule;
  const char* name;
  uint32_t traits;
};

// In the order of the enumeration.
#define SPECDEC_RULE(id, name, traits) {Rule::id, name, traits},
constexpr NamedRule kRules[] = {SPECDEC_RULES(SPECDEC_RULE)};
#undef SPECDEC_RULE

// The rules that have a trait, bit i for rule i. For initialisers: device code knows constants, but
// neither this function nor the table.
constexpr uint32_t rules_with(Trait trait) {
  uint32_t found = 0;
  for (const NamedRule& r : kRules) {
    if (r.traits & trait) found |= uint32_t{1} << static_cast<int>(r.rule);
  }
  return found;
}

constexpr uint32_t kRulesThatReadDraftLaw = rules_with(kReadsDraftLaw);
constexpr uint32_t kRulesThatTakeCoins = rules_with(kTakesCoins);
constexpr uint32_t kRulesThatRace = rules_with(kRaces);

}  // namespace specdec
