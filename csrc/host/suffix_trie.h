// What followed each short piece of some texts, and how often: the trie of all pieces of up to
// max_match + 1 tokens, with counts, from which drafters that copy propose chains and trees.
//
// Why a trie of bounded depth, and no suffix automaton or tree: texts must leave it again (a store
// of bounded memory), which those do not allow in time that depends on the text that leaves alone,
// and a count of an automaton's state would have to be summed over its links. No context of more
// than max_match tokens is asked for, so nothing deeper is kept.
//
// A piece that occurred once is a *leaf*: what follows it stands in its text, and is read there. So
// a token adds one node, and one more for each suffix of the text that occurred before: at most
// max_match + 1, on any but a repetitive text few. An append visits as many nodes; a text that
// leaves takes at most max_match + 1 visits a token. An expected O(1) each, in a hash table.
//
// A place is a token's index in all that was ever appended; every text begins at one of its own. Of
// what followed a piece equally often, the one that came last (the highest place) is taken first. A
// text that leaves takes its counts along, but no such memory: who still counts was last seen where
// it was last seen.
//
// Tokens are any int64. Nodes are indices that this class alone makes, so none is out of bounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace specdec {

// What a trie proposes: nodes level by level, children of one node together, likeliest first.
struct Growth {
  std::vector<int64_t> tokens;
  std::vector<int64_t> parents;   // an earlier node, -1: the context's end
  std::vector<double> survivals;  // the estimated probability that node and ancestors are accepted
  double expected = 0;            // their sum: the tokens that are expected to be accepted
  int64_t text = -1;  // where the first of them was seen last; -1: in one that was dropped, nowhere
};

// The estimated probability that a copy behind `agreed` tokens is right once more. Measured on what
// SmolLM2-135M-Instruct writes over code and texts that it is given: about 0.3, 0.5, 0.8, 0.85
// behind 1, 2, 3, 4 tokens, 0.95 behind 8 and more.
inline double agrees_again(int64_t agreed) {
  const double square = static_cast<double>(agreed) * static_cast<double>(agreed);
  return square / (square + 2);
}

class SuffixTrie {
 public:
  using Tokens = std::vector<int64_t>;

  explicit SuffixTrie(int64_t max_match) : max_match_(max_match), nodes_(1) {
    if (max_match < 1 || max_match > kMostMatched) {
      throw std::invalid_argument("SuffixTrie: max_match must be in [1, " +
                                  std::to_string(kMostMatched) + "], got " +
                                  std::to_string(max_match));
    }
    nodes_[0].expanded = true;
    texts_[0];
  }

  int64_t size() const { return size_; }
  int64_t nodes() const { return static_cast<int64_t>(nodes_.size() - free_.size()); }
  int64_t visits() const { return visits_; }

  void append(const Tokens& tokens) {
    for (const int64_t token : tokens) append_one(token);
  }

  // End the text that grows; what is appended from here on is another one. Returns its number.
  int64_t close() {
    const auto& [begin, text] = *texts_.rbegin();
    const int64_t closed = begin;
    open_ = closed + static_cast<int64_t>(text.size()) + 1;
    texts_[open_];
    active_.clear();
    return closed;
  }

  // Forget a text that was closed.
  void drop(int64_t number) {
    const auto found = texts_.find(number);
    if (found == texts_.end() || number == open_) {
      throw std::invalid_argument("SuffixTrie: text must be one that was closed and not dropped, " +
                                  std::string("got ") + std::to_string(number));
    }
    const Tokens& text = found->second;
    for (size_t begin = 0; begin < text.size(); ++begin) forget(text, begin);
    size_ -= static_cast<int64_t>(text.size());
    texts_.erase(found);
  }

  // Propose up to `nodes` tokens behind a context, no deeper than `depth`, at most `breadth` for
  // each place, none whose survival is below `least`.
  //
  // The estimate. A node's survival is its parent's, times its share of what followed the node's
  // context, times agrees_again(m), where m is the context's length. Nodes come in the order of
  // survival, equal ones in the order in which they came up.
  //
  // Contexts. That of a node is the path to it behind the last m tokens of the given context, of
  // which the last max_match tokens count; while nothing followed, its front is dropped, down to
  // min_match tokens. At first m is the longest suffix that something followed; or, with
  // `any_length`, whichever length promises most, the longest of equals.
  Growth grow(const Tokens& context, int64_t nodes, int64_t depth, int64_t breadth,
              int64_t min_match, double least, bool any_length) const {
    Growth best;
    if (nodes < 1 || depth < 1 || breadth < 1) return best;
    const int64_t longest = std::min<int64_t>(max_match_, context.size());
    int64_t followed = 0;
    for (int64_t match = longest; match >= std::max<int64_t>(min_match, 1); --match) {
      const int64_t total = sum(followers(context.end() - match, context.end()));
      if (total == followed) continue;  // it occurred where a longer one did, and nowhere else
      followed = total;
      Growth found = grow_behind({context.end() - match, context.end()}, nodes, depth, breadth,
                                 std::max<int64_t>(min_match, 1), least);
      if (found.expected > best.expected) best = std::move(found);
      if (!any_length) break;
    }
    return best;
  }

 private:
  static constexpr int64_t kMostMatched = 1024;

  struct Node {
    int64_t token = 0;
    int64_t count = 0;
    int64_t newest = -1;  // the place of its last token where it occurred last
    int64_t parent = -1;
    int64_t child = -1;                // the first one
    int64_t next = -1, previous = -1;  // siblings
    int64_t depth = 0;
    bool expanded = false;  // else a leaf, unless it is as deep as any
  };

  struct Edge {
    int64_t node, token;
    bool operator==(const Edge& other) const { return node == other.node && token == other.token; }
  };

  struct MixBits {
    size_t operator()(const Edge& edge) const {
      uint64_t mixed = static_cast<uint64_t>(edge.token) * 0x9E3779B97F4A7C15u;
      mixed = (mixed ^ mixed >> 32 ^ static_cast<uint64_t>(edge.node)) * 0xD6E8FEB86659FD93u;
      return static_cast<size_t>(mixed ^ mixed >> 32);
    }
  };

  struct Follower {
    int64_t token, count, newest;
  };
  using Place = Tokens::const_iterator;

  // A node that is being proposed: `agreed` is the length of the context that it leaves.
  struct Proposed {
    int64_t token, parent, depth, agreed, newest;
    double survival;
  };

  // --- what the trie holds ---

  int64_t limit() const { return max_match_ + 1; }

  int64_t find(int64_t node, int64_t token) const {
    const auto found = edges_.find({node, token});
    return found == edges_.end() ? -1 : found->second;
  }

  // The text that holds a place; -1: it was dropped.
  int64_t text_of(int64_t place) const {
    const auto behind = texts_.upper_bound(place);
    if (behind == texts_.begin()) return -1;
    const auto& [begin, text] = *std::prev(behind);
    return place - begin < static_cast<int64_t>(text.size()) ? begin : -1;
  }

  // The token behind a place in a text that is held, if that goes on there.
  bool token_after(int64_t place, int64_t* token) const {
    const auto& [begin, text] = *std::prev(texts_.upper_bound(place));
    const int64_t index = place - begin + 1;
    if (index >= static_cast<int64_t>(text.size())) return false;
    *token = text[index];
    return true;
  }

  void add(int64_t parent, int64_t token, int64_t place) {
    int64_t added = static_cast<int64_t>(nodes_.size());
    if (free_.empty()) {
      nodes_.emplace_back();
    } else {
      added = free_.back();
      free_.pop_back();
      nodes_[added] = Node();
    }
    Node& node = nodes_[added];
    node.token = token;
    node.count = 1;
    node.newest = place;
    node.parent = parent;
    node.depth = nodes_[parent].depth + 1;
    node.next = nodes_[parent].child;
    if (node.next >= 0) nodes_[node.next].previous = added;
    nodes_[parent].child = added;
    edges_.emplace(Edge{parent, token}, added);
  }

  // A leaf is about to occur again: what followed it becomes a node.
  void expand(int64_t leaf) {
    nodes_[leaf].expanded = true;
    const int64_t place = nodes_[leaf].newest;
    int64_t token;
    if (token_after(place, &token)) add(leaf, token, place + 1);
  }

  void append_one(int64_t token) {
    Tokens& text = texts_.rbegin()->second;
    const int64_t place = open_ + static_cast<int64_t>(text.size());
    text.push_back(token);
    ++size_;
    active_.push_back(0);
    size_t kept = 0;
    for (const int64_t node : active_) {
      ++visits_;
      const int64_t child = find(node, token);
      if (child < 0) {
        add(node, token, place);  // it goes on in the text
        continue;
      }
      const bool deepest = nodes_[child].depth == limit();
      if (!nodes_[child].expanded && !deepest) expand(child);
      ++nodes_[child].count;
      nodes_[child].newest = place;
      if (!deepest) active_[kept++] = child;
    }
    active_.resize(kept);
  }

  // Take back what the piece that begins here added.
  void forget(const Tokens& text, size_t begin) {
    const size_t end = std::min(text.size(), begin + static_cast<size_t>(limit()));
    int64_t node = 0;
    for (size_t i = begin; i < end; ++i) {
      ++visits_;
      node = find(node, text[i]);
      if (--nodes_[node].count > 0) continue;
      remove(node);
      return;
    }
  }

  // Remove a node, and those below it: one occurrence's, a path.
  void remove(int64_t node) {
    Node& parent = nodes_[nodes_[node].parent];
    const int64_t next = nodes_[node].next, previous = nodes_[node].previous;
    if (next >= 0) nodes_[next].previous = previous;
    (previous >= 0 ? nodes_[previous].next : parent.child) = next;
    while (node >= 0) {
      ++visits_;
      edges_.erase({nodes_[node].parent, nodes_[node].token});
      free_.push_back(node);
      node = nodes_[node].child;
    }
  }

  // --- what it proposes ---

  // What followed a context of 1 to max_match tokens: the most frequent first, then the newest.
  std::vector<Follower> followers(Place begin, Place end) const {
    std::vector<Follower> found;
    int64_t node = 0;
    for (; begin != end && nodes_[node].expanded; ++begin) {
      node = find(node, *begin);
      if (node < 0) return found;
    }
    int64_t place = nodes_[node].newest, token;
    if (!nodes_[node].expanded) {
      for (; begin != end; ++begin, ++place) {
        if (!token_after(place, &token) || token != *begin) return found;
      }
      if (token_after(place, &token)) found.push_back({token, 1, place + 1});
      return found;
    }
    for (int64_t child = nodes_[node].child; child >= 0; child = nodes_[child].next) {
      found.push_back({nodes_[child].token, nodes_[child].count, nodes_[child].newest});
    }
    std::sort(found.begin(), found.end(), [](const Follower& a, const Follower& b) {
      return a.count != b.count ? a.count > b.count : a.newest > b.newest;
    });
    return found;
  }

  static int64_t sum(const std::vector<Follower>& followers) {
    int64_t total = 0;
    for (const Follower& follower : followers) total += follower.count;
    return total;
  }

  Growth grow_behind(const Tokens& context, int64_t most, int64_t depth, int64_t breadth,
                     int64_t min_match, double least) const {
    std::vector<Proposed> pool;
    const auto later = [&pool](int64_t a, int64_t b) {
      return pool[a].survival != pool[b].survival ? pool[a].survival < pool[b].survival : a > b;
    };
    std::priority_queue<int64_t, Tokens, decltype(later)> waiting(later);
    const auto offer_children = [&](int64_t parent) {
      Tokens path = context;
      for (int64_t node = parent; node >= 0; node = pool[node].parent) {
        path.insert(path.begin() + static_cast<int64_t>(context.size()), pool[node].token);
      }
      int64_t agreed = parent < 0 ? static_cast<int64_t>(context.size()) : pool[parent].agreed;
      int64_t window = std::min(agreed, max_match_);
      std::vector<Follower> found = followers(path.end() - window, path.end());
      while (found.empty() && window > min_match) {
        agreed = --window;
        found = followers(path.end() - window, path.end());
      }
      const double before = parent < 0 ? 1.0 : pool[parent].survival;
      const double again = before * agrees_again(agreed);
      const double total = static_cast<double>(sum(found));
      const int64_t level = parent < 0 ? 1 : pool[parent].depth + 1;
      if (static_cast<int64_t>(found.size()) > breadth) found.resize(breadth);
      for (const Follower& next : found) {
        const double survival = again * (static_cast<double>(next.count) / total);
        if (survival < least) break;
        pool.push_back({next.token, parent, level, agreed + 1, next.newest, survival});
        waiting.push(static_cast<int64_t>(pool.size()) - 1);
      }
    };
    std::vector<int64_t> chosen;
    offer_children(-1);
    while (!waiting.empty() && static_cast<int64_t>(chosen.size()) < most) {
      chosen.push_back(waiting.top());
      waiting.pop();
      if (pool[chosen.back()].depth < depth) offer_children(chosen.back());
    }
    return by_levels(pool, chosen);
  }

  // Number the chosen nodes level by level, children of one node together.
  Growth by_levels(const std::vector<Proposed>& pool, const std::vector<int64_t>& chosen) const {
    std::vector<std::vector<int64_t>> children(pool.size() + 1);
    for (const int64_t node : chosen) children[pool[node].parent + 1].push_back(node);
    Growth found;
    std::vector<int64_t> order = children[0];
    std::vector<int64_t> parents(order.size(), -1);
    for (size_t i = 0; i < order.size(); ++i) {
      const Proposed& node = pool[order[i]];
      found.tokens.push_back(node.token);
      found.parents.push_back(parents[i]);
      found.survivals.push_back(node.survival);
      found.expected += node.survival;
      for (const int64_t child : children[order[i] + 1]) {
        order.push_back(child);
        parents.push_back(static_cast<int64_t>(i));
      }
    }
    if (!order.empty()) found.text = text_of(pool[order[0]].newest);
    return found;
  }

  int64_t max_match_;
  std::vector<Node> nodes_;  // the first is the root
  std::vector<int64_t> free_;
  std::unordered_map<Edge, int64_t, MixBits> edges_;
  std::map<int64_t, Tokens> texts_;  // by the place where each begins
  int64_t open_ = 0;                 // the one that grows
  int64_t size_ = 0;
  // The suffixes of the growing text that occurred before, longest first.
  std::vector<int64_t> active_;
  int64_t visits_ = 0;
};

}  // namespace specdec
