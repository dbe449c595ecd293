// Where a text that copies is in what it copies, and what comes next there.
//
// A text that repeats its input, code that is edited, say, or a text that is quoted, mostly does so
// in reading order. So of several places where its end occurred before, the next one in the input
// behind the place that was copied last is the likeliest; behind none, the one that came last.
//
// The *anchor* is the place of the input that is to be copied next, as of the last time that at
// least kSure tokens agreed (one token that occurred before says little). It follows from the text
// alone, token by token, whoever proposed what.
//
// Cost: `append` filters the places that still agree, and looks at all places of one token where
// none does: as many as that token occurred, on any but a repetitive text few.
//
// Tokens are any int64. Places are indices of tokens that were appended, so none is out of bounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "suffix_trie.h"

namespace specdec {

class CopyReader {
 public:
  using Tokens = std::vector<int64_t>;

  // Read on in what the text may copy. Not after `append`.
  void append_input(const Tokens& tokens) {
    for (const int64_t token : tokens) read(token);
    input_ = size();
  }

  // Read on in the text.
  void append(const Tokens& tokens) {
    for (const int64_t token : tokens) {
      read(token);
      if (match_ >= kSure) anchor_ = source();
    }
  }

  int64_t size() const { return static_cast<int64_t>(text_.size()); }
  // The length of the longest suffix that occurred before.
  int64_t match() const { return match_; }
  // The place of the token to copy next; -1: nothing agrees.
  int64_t source() const {
    if (sources_.empty()) return -1;
    const auto ahead = std::lower_bound(sources_.begin(), sources_.end(), anchor_);
    return ahead != sources_.end() && *ahead < input_ ? *ahead : sources_.back();
  }

  // Copy up to `most` tokens behind a match of at least min_match, none whose survival, the product
  // of `agrees_again` along the copy, is below `least`. A copy that reaches the text's end goes on
  // in itself.
  Growth copy(int64_t most, int64_t min_match, double least) const {
    Growth found;
    const int64_t from = source();
    if (from < 0 || match_ < min_match) return found;
    double survival = 1;
    for (int64_t i = 0; i < most; ++i) {
      survival *= agrees_again(match_ + i);
      if (survival < least) break;
      const int64_t place = from + i;
      found.tokens.push_back(place < size() ? text_[place] : found.tokens[place - size()]);
      found.parents.push_back(i - 1);
      found.survivals.push_back(survival);
      found.expected += survival;
    }
    return found;
  }

 private:
  static constexpr int64_t kSure = 2;

  void read(int64_t token) {
    Tokens agreeing;
    for (const int64_t place : sources_) {
      if (text_[place] == token) agreeing.push_back(place + 1);
    }
    text_.push_back(token);
    if (agreeing.empty()) {
      std::tie(match_, agreeing) = longest(token);
    } else {
      ++match_;
    }
    sources_ = std::move(agreeing);
    places_[token].push_back(size() - 1);
  }

  // The longest suffix of the text, which ends with this token, that occurred before, and the
  // places behind its occurrences, in order.
  std::pair<int64_t, Tokens> longest(int64_t token) const {
    const auto known = places_.find(token);
    if (known == places_.end()) return {0, {}};
    Tokens ends = known->second, longer;
    int64_t length = 1;
    for (;; ++length, ends.swap(longer)) {
      longer.clear();
      for (const int64_t end : ends) {
        if (end >= length && text_[end - length] == text_[size() - 1 - length]) {
          longer.push_back(end);
        }
      }
      if (longer.empty()) break;
    }
    for (int64_t& end : ends) ++end;
    return {length, std::move(ends)};
  }

  Tokens text_;
  std::unordered_map<int64_t, Tokens> places_;
  Tokens sources_;  // behind the places where the longest suffix that occurred ended before
  int64_t match_ = 0, anchor_ = 0, input_ = 0;
};

}  // namespace specdec
