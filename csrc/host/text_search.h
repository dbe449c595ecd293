// What a drafter that copies an input asks of it: where the end of another text occurs in it. O(1)
// a token, amortised (suffix_automaton.h).
#pragma once

#include <cstdint>
#include <vector>

#include "suffix_automaton.h"

namespace specdec {

// Follows an output through an input: the longest suffix of the output that occurs in the input.
class InputMatcher {
 public:
  explicit InputMatcher(const std::vector<int64_t>& input) {
    for (const int64_t token : input) automaton_.append(token);
  }

  void append(const std::vector<int64_t>& tokens) {
    for (const int64_t token : tokens) match_ = automaton_.follow(match_, token);
  }

  int64_t match_length() const { return match_.length; }
  int64_t visits() const { return automaton_.visits(); }

  // The index of the match's last token if it occurs once in the input, else -1. Where some suffix
  // of the output occurs once, the longest that occurs at all does, and ends at the same place.
  int64_t unique_end() const {
    const bool once = match_.length > 0 && automaton_.occurs_once(match_.state);
    return once ? automaton_.end(match_.state) : -1;
  }

 private:
  SuffixAutomaton automaton_;
  SuffixAutomaton::Match match_;
};

}  // namespace specdec
