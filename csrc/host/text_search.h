// What drafters that copy ask of a text: where its own end occurred before, and where the end of
// another text occurs in it. Both are O(1) a token, amortised (suffix_automaton.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "suffix_automaton.h"

namespace specdec {

// The longest suffix of a growing text, of max_match tokens at most, that occurred before; and
// where it did last.
//
// The match follows each token before the token is appended, so it never meets itself. The latest
// ends are exact for every state that has a substring of up to max_match tokens: the states of the
// text's repeated suffixes of up to that length are the match's own and those that its links lead
// to, and all of them end here. That is at most max_match visits a token, whatever the text is, and
// few on any but a periodic one; the bound is the reason for max_match. (Without it, no structure
// is known that keeps the latest end in O(1).) A query reads what `append` left.
class RepeatFinder {
 public:
  explicit RepeatFinder(int64_t max_match) : max_match_(max_match) {
    if (max_match < 1) {
      throw std::invalid_argument("RepeatFinder: max_match must be at least 1, got " +
                                  std::to_string(max_match));
    }
  }

  void append(const std::vector<int64_t>& tokens) {
    for (const int64_t token : tokens) append_one(token);
  }

  // The match, and the index of the last token of its latest earlier occurrence (-1: no match).
  int64_t match_length() const { return match_.length; }
  int64_t match_end() const { return match_end_; }
  int64_t size() const { return automaton_.size(); }
  int64_t visits() const { return automaton_.visits() + visits_; }

  // Up to `count` tokens that came after the match, if that has min_match tokens. Where they reach
  // the end of the text they go on in what was copied: a period repeats.
  std::vector<int64_t> continuation(int64_t count, int64_t min_match) const {
    std::vector<int64_t> copied;
    if (match_.length < std::max<int64_t>(min_match, 1)) return copied;
    const int64_t period = size() - 1 - match_end_;
    for (int64_t i = 0; i < count; ++i) {
      copied.push_back(i < period ? text_[match_end_ + 1 + i] : copied[i - period]);
    }
    return copied;
  }

 private:
  void append_one(int64_t token) {
    const SuffixAutomaton::Match longer = automaton_.follow(match_, token);
    automaton_.append(token);
    text_.push_back(token);
    match_ = automaton_.shorten(longer, max_match_);
    match_end_ = match_.length == 0 ? -1 : automaton_.end(match_.state);
    for (int64_t state = match_.state; state > 0; state = automaton_.link(state)) {
      automaton_.set_end(state, size() - 1);
      ++visits_;
    }
  }

  int64_t max_match_;
  SuffixAutomaton automaton_;
  std::vector<int64_t> text_;
  SuffixAutomaton::Match match_;
  int64_t match_end_ = -1;
  int64_t visits_ = 0;
};

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
