// The suffix automaton of a text that grows token by token (Blumer et al. 1985): the smallest
// automaton that reads the text's substrings, and nothing else.
//
// A state stands for the substrings that end at the same places of the text; they are the suffixes
// of its longest one, down to one token more than the state that its link leads to. A state that
// nothing links to stands for substrings that occur once.
//
// Cost, n tokens in all: there are at most 2n states and 3n transitions, none is ever removed, and
// a transition costs expected O(1) in a hash table.
//  - `append` visits a state to add a transition (3n in all), to copy one into a split state (again
//    3n, for the copies stay) or to redirect one (n: each such visit moves the beginning of the
//    suffix that the last state's second link stands for to the right, and nothing moves it back).
//    Hence O(1) a token, amortised.
//  - `follow` takes a link only where it shortens the match by a token or more, and a token
//    lengthens the match by one: at most 2n visits for n tokens followed, whatever the text.
// `visits` counts them, so that a test can hold the code to it.
//
// Tokens are any int64. States are indices that this class alone makes, so none is out of bounds.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

namespace specdec {

class SuffixAutomaton {
 public:
  // A substring of the text: its state, and its length among the substrings of that state.
  struct Match {
    int64_t state = 0;
    int64_t length = 0;
  };

  SuffixAutomaton() { states_.emplace_back(); }

  int64_t size() const { return size_; }
  int64_t states() const { return static_cast<int64_t>(states_.size()); }
  int64_t visits() const { return visits_; }

  // The first end of the state's substrings, as an index into the text. A state that splits hands
  // it on.
  int64_t end(int64_t state) const { return states_[state].end; }

  bool occurs_once(int64_t state) const { return !states_[state].is_linked_to; }

  // Lengthen the match by a token, after dropping as much of its front as that needs: the longest
  // suffix of it that the text continues with this token.
  Match follow(Match match, int64_t token) {
    ++visits_;
    for (;;) {
      const State& state = states_[match.state];
      const auto next = state.next.find(token);
      if (next != state.next.end()) return {next->second, match.length + 1};
      if (state.link < 0) return {};
      match = {state.link, states_[state.link].length};
      ++visits_;
    }
  }

  void append(int64_t token) {
    const int64_t added = add_state(states_[last_].length + 1);
    int64_t state = last_;
    for (; state >= 0 && states_[state].next.try_emplace(token, added).second; ++visits_) {
      state = states_[state].link;
    }
    set_link(added, state < 0 ? 0 : state_of_length(state, token));
    last_ = added;
    ++size_;
  }

 private:
  struct MixBits {  // ids with a common stride would share buckets
    size_t operator()(int64_t token) const {
      const uint64_t mixed = static_cast<uint64_t>(token) * 0x9E3779B97F4A7C15u;
      return static_cast<size_t>(mixed ^ mixed >> 32);
    }
  };

  struct State {
    int64_t length = 0;  // of its longest substring
    int64_t link = -1;   // the state of the longest suffix that ends elsewhere, too
    int64_t end = -1;
    bool is_linked_to = false;
    std::unordered_map<int64_t, int64_t, MixBits> next;
  };

  int64_t add_state(int64_t length) {
    State& state = states_.emplace_back();
    state.length = length;
    state.end = size_;
    return states() - 1;
  }

  void set_link(int64_t state, int64_t link) {
    states_[state].link = link;
    states_[link].is_linked_to = true;
  }

  // The state of exactly the longest substring of `state` and this token: where it is not the
  // longest one of its own state, that state splits.
  int64_t state_of_length(int64_t state, int64_t token) {
    const int64_t whole = states_[state].next.at(token), length = states_[state].length + 1;
    if (states_[whole].length == length) return whole;
    const int64_t part = add_state(length);
    states_[part].next = states_[whole].next;
    states_[part].end = states_[whole].end;
    visits_ += static_cast<int64_t>(states_[part].next.size());
    set_link(part, states_[whole].link);
    set_link(whole, part);
    for (; state >= 0; state = states_[state].link, ++visits_) {
      int64_t& next = states_[state].next.at(token);
      if (next != whole) break;
      next = part;
    }
    return part;
  }

  std::deque<State> states_;  // a deque: growing moves no state
  int64_t size_ = 0;
  int64_t last_ = 0;  // the state of the whole text
  int64_t visits_ = 0;
};

}  // namespace specdec
