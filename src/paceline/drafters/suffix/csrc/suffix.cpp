// ContextIndex of index.py and the vote of vote.py, in C++: the same matches, the same drafts, bit for bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <new>
#include <utility>
#include <vector>

namespace {

using Token = uint32_t;
constexpr Token kSeparator = 0xFFFFFFFF;  // stands before and behind every document; never a token
constexpr int kRoot = -1;
constexpr int kFailed = -1;

// As in vote.py.
constexpr int kWindow = 6;
constexpr size_t kVoters = 4;
constexpr double kFade = 0.6;
constexpr double kReach = 1.5;
constexpr double kDoubt = 0.8;

struct Match {
  int64_t length;
  int rank;
  int64_t position;  // of what followed
  const std::vector<Token>* log;

  bool operator>(const Match& other) const {
    if (length != other.length) return length > other.length;
    return rank != other.rank ? rank > other.rank : position > other.position;
  }
};

// A context, read backwards from its last token.
struct Query {
  const Token* tokens;
  int64_t length;
};

class Index {
 public:
  Index(int64_t depth, int64_t block, int64_t slack)
      : depth_(depth), block_(block), slack_(slack), log_(depth + 1, kSeparator), blocks_(1) {}

  int64_t depth() const { return depth_; }
  int64_t size() const { return size_; }
  int64_t documents() const { return spans_.size(); }
  int64_t log_length() const { return log_.size(); }
  int64_t held() const { return spans_.empty() ? 0 : log_.size() - spans_[0].first; }

  void open(const Token* context, int64_t count) {
    const int64_t taken = std::min(count, depth_);
    log_.insert(log_.end(), context + count - taken, context + count);
    const int64_t start = count ? log_.size() - 1 : log_.size();
    log_.push_back(kSeparator);
    spans_.emplace_back(start, start);
  }

  void extend(const Token* tokens, int64_t count) {
    if (!count) return;
    const int64_t stop = spans_.back().second;
    log_.pop_back();
    log_.insert(log_.end(), tokens, tokens + count);
    const int64_t end = log_.size() - 1;  // the last token has no successor yet
    log_.push_back(kSeparator);
    spans_.back().second = end;
    if (end - stop > size_) {
      std::vector<Token> positions = all_positions();
      for (int64_t position = stop; position < end; ++position) positions.push_back(position);
      std::stable_sort(positions.begin(), positions.end(),
                       [this](Token a, Token b) { return compare(a, b) < 0; });
      adopt(positions.data(), positions.size());
    } else {
      for (int64_t position = stop; position < end; ++position) insert(position);
    }
  }

  void evict() {
    const auto [first, stop] = spans_.front();
    spans_.pop_front();
    for (int64_t position = first; position < stop; ++position) remove(position);
    trim(std::max(slack_, static_cast<int64_t>(log_.size()) / 4));
  }

  // Cuts evicted tokens off the log, except contexts of live documents.
  void trim(int64_t slack) {
    const int64_t start = spans_.empty() ? static_cast<int64_t>(log_.size()) - 1 : spans_[0].first;
    const int64_t cut = start - depth_;
    if (cut <= slack) return;
    log_.erase(log_.begin(), log_.begin() + cut);
    for (auto& span : spans_) span.first -= cut, span.second -= cut;
    for (auto& block : blocks_)
      for (auto& position : block) position -= cut;
  }

  void copy(Token* log, Token* positions, int64_t* spans) const {
    std::copy(log_.begin(), log_.end(), log);
    for (const auto& block : blocks_) positions = std::copy(block.begin(), block.end(), positions);
    for (const auto& span : spans_) *spans++ = span.first, *spans++ = span.second;
  }

  // False: the positions are not in order.
  bool restore(const Token* log, int64_t length, const Token* positions, int64_t count, const int64_t* spans,
               int64_t documents) {
    log_.assign(log, log + length);
    spans_.clear();
    for (int64_t i = 0; i < documents; ++i) spans_.emplace_back(spans[2 * i], spans[2 * i + 1]);
    adopt(positions, count);
    for (int64_t i = 1; i < count; ++i) {
      const int order = compare(positions[i - 1], positions[i]);
      if (order > 0 || (order == 0 && positions[i - 1] >= positions[i])) return false;
    }
    return true;
  }

  // The end of the newest document, last token first, after `count` tokens that stand there already.
  int64_t read_end(Token* tokens, int64_t count) const {
    for (int64_t at = log_.size() - 2; count < depth_ && log_[at] != kSeparator; --at) tokens[count++] = log_[at];
    return count;
  }

  void nearest(const Query& query, int limit, int rank, std::vector<Match>& matches) const {
    if (!size_ || !query.length) return;
    const auto found = std::upper_bound(
        blocks_.begin(), blocks_.end(), query,
        [this](const Query& q, const std::vector<Token>& block) { return compare(q, block.front()) < 0; });
    int64_t i = found == blocks_.begin() ? 0 : found - blocks_.begin() - 1;
    const auto& block = blocks_[i];
    int64_t at = std::upper_bound(block.begin(), block.end(), query,
                                  [this](const Query& q, Token position) { return compare(q, position) < 0; }) -
                 block.begin();
    const int64_t block_below = i, below = at;
    int64_t length = query.length;
    for (int taken = 0; taken < limit; ++taken, ++at) {
      while (i < static_cast<int64_t>(blocks_.size()) && at == static_cast<int64_t>(blocks_[i].size())) ++i, at = 0;
      if (i == static_cast<int64_t>(blocks_.size()) || !add(query, blocks_[i][at], rank, length, matches)) break;
    }
    i = block_below, at = below, length = query.length;
    for (int taken = 0; taken < limit; ++taken) {
      while (i >= 0 && at == 0)
        if (--i >= 0) at = blocks_[i].size();
      if (i < 0 || !add(query, blocks_[i][--at], rank, length, matches)) break;
    }
  }

 private:
  // Matches only get shorter with the distance from the query's own position in the order.
  bool add(const Query& query, Token position, int rank, int64_t& length, std::vector<Match>& matches) const {
    int64_t same = 0;
    while (same < length && log_[position - same] == query.tokens[same]) ++same;
    length = same;
    if (length) matches.push_back({length, rank, static_cast<int64_t>(position) + 1, &log_});
    return length > 0;
  }

  // The contexts of two positions.
  int compare(Token a, Token b) const {
    for (int64_t i = 0; i < depth_; ++i)
      if (log_[a - i] != log_[b - i]) return log_[a - i] < log_[b - i] ? -1 : 1;
    return 0;
  }

  // A shorter query comes before the contexts it begins.
  int compare(const Query& query, Token position) const {
    for (int64_t i = 0; i < query.length; ++i)
      if (query.tokens[i] != log_[position - i]) return query.tokens[i] < log_[position - i] ? -1 : 1;
    return query.length < depth_ ? -1 : 0;
  }

  // By context, then by position.
  bool before(Token a, Token b) const {
    const int order = compare(a, b);
    return order ? order < 0 : a < b;
  }

  int64_t block_of(Token position) const {
    const auto found = std::upper_bound(
        blocks_.begin(), blocks_.end(), position,
        [this](Token p, const std::vector<Token>& block) { return !block.empty() && before(p, block.front()); });
    return found == blocks_.begin() ? 0 : found - blocks_.begin() - 1;
  }

  void insert(Token position) {
    const int64_t i = block_of(position);
    auto& block = blocks_[i];
    const auto less = [this](Token a, Token b) { return before(a, b); };
    block.insert(std::upper_bound(block.begin(), block.end(), position, less), position);
    ++size_;
    if (static_cast<int64_t>(block.size()) < 2 * block_) return;
    std::vector<Token> upper(block.begin() + block_, block.end());
    block.resize(block_);
    blocks_.insert(blocks_.begin() + i + 1, std::move(upper));
  }

  void remove(Token position) {
    int64_t i = block_of(position);
    const auto less = [this](Token a, Token b) { return before(a, b); };
    blocks_[i].erase(std::lower_bound(blocks_[i].begin(), blocks_[i].end(), position, less));
    --size_;
    if (static_cast<int64_t>(blocks_[i].size()) >= std::max<int64_t>(1, block_ / 4) || blocks_.size() == 1) return;
    i = std::max<int64_t>(1, i);
    blocks_[i - 1].insert(blocks_[i - 1].end(), blocks_[i].begin(), blocks_[i].end());
    blocks_.erase(blocks_.begin() + i);
  }

  std::vector<Token> all_positions() const {
    std::vector<Token> positions;
    for (const auto& block : blocks_) positions.insert(positions.end(), block.begin(), block.end());
    return positions;
  }

  void adopt(const Token* positions, int64_t count) {
    blocks_.clear();
    for (int64_t i = 0; i < count; i += block_)
      blocks_.emplace_back(positions + i, positions + std::min(count, i + block_));
    if (blocks_.empty()) blocks_.emplace_back();
    size_ = count;
  }

  int64_t depth_, block_, slack_, size_ = 0;
  std::vector<Token> log_;
  std::deque<std::pair<int64_t, int64_t>> spans_;  // documents, oldest first
  std::vector<std::vector<Token>> blocks_;         // positions, sorted by (context, position) throughout
};

// The longest matches of the end of `own` and `after`, best first.
std::vector<Match> best_matches(const Index& own, const Index* past, const Token* after, int64_t count) {
  std::vector<Token> tokens(own.depth());
  int64_t length = 0;
  while (length < own.depth() && length < count) tokens[length] = after[count - 1 - length], ++length;
  const Query query{tokens.data(), own.read_end(tokens.data(), length)};
  std::vector<Match> matches;
  matches.reserve(4 * kWindow);
  own.nearest(query, kWindow, 1, matches);
  if (past) past->nearest(query, kWindow, 0, matches);
  std::sort(matches.begin(), matches.end(), std::greater<Match>());
  if (matches.size() > kVoters) matches.resize(kVoters);
  return matches;
}

struct Voter {
  double weight;
  int64_t position;
  const std::vector<Token>* log;
  Token at(int64_t step) const { return (*log)[position + step]; }
};

struct Camp {
  double weight;
  Token token;
  std::vector<Voter> voters;
};

struct Waiting {
  double path;
  int age;
  int parent;
  double chance;
  int64_t depth;
  Camp camp;

  bool operator<(const Waiting& other) const {  // the largest leaves the heap first
    return path != other.path ? path < other.path : age > other.age;
  }
};

class Tree {
 public:
  Tree(int64_t budget, uint32_t* tokens, int32_t* parents, double* chances)
      : budget_(budget), tokens_(tokens), parents_(parents), chances_(chances) {}

  int size() const { return size_; }
  int64_t room() const { return budget_ - size_; }

  int add(Token token, int parent, double chance) {
    tokens_[size_] = token, parents_[size_] = parent, chances_[size_] = chance;
    return size_++;
  }

 private:
  int64_t budget_;
  uint32_t* tokens_;
  int32_t* parents_;
  double* chances_;
  int size_ = 0;
};

std::vector<Voter> weigh(const std::vector<Match>& matches) {
  std::vector<Voter> voters;
  double weight = 1.0;
  int64_t before = matches[0].length;
  for (const Match& match : matches) {
    if (match.length != before) {
      weight *= std::pow(kReach, static_cast<double>(match.length - before));
      before = match.length;
    }
    voters.push_back({weight, match.position, match.log});
    weight *= kFade;
  }
  return voters;
}

// How many tokens all of them vote for, from `step` positions on.
int64_t unanimous(const std::vector<Voter>& voters, int64_t step, int64_t limit) {
  for (const Voter& voter : voters)
    limit = std::min<int64_t>(limit, voter.log->size() - voter.position - step);
  for (size_t i = 1; i < voters.size(); ++i) {
    int64_t same = 0;
    while (same < limit && voters[0].at(step + same) == voters[i].at(step + same)) ++same;
    limit = same;
  }
  return limit;
}

std::vector<Camp> camps_of(const std::vector<Voter>& voters, int64_t step) {
  std::vector<Camp> camps;
  for (const Voter& voter : voters) {
    const Token token = voter.at(step);
    if (token == kSeparator) continue;
    const auto of_token = [token](const Camp& camp) { return camp.token == token; };
    const auto found = std::find_if(camps.begin(), camps.end(), of_token);
    if (found == camps.end()) {
      camps.push_back({voter.weight, token, {voter}});
    } else {
      found->weight += voter.weight;
      found->voters.push_back(voter);
    }
  }
  std::stable_sort(camps.begin(), camps.end(), [](const Camp& a, const Camp& b) { return a.weight > b.weight; });
  return camps;
}

void elect(const std::vector<Match>& matches, int64_t width, double min_chance, Tree& tree) {
  const int64_t longest = matches[0].length;
  std::vector<Waiting> waiting;  // a heap
  std::vector<Voter> voters = weigh(matches);
  int node = kRoot, age = 0;
  double path = 1.0;
  int64_t depth = 0;
  while (true) {
    if (waiting.empty()) {  // no other path competes: unanimous votes are taken in one go
      double weight = 0.0;
      for (const Voter& voter : voters) weight += voter.weight;
      const int64_t agreed = unanimous(voters, depth, tree.room());
      for (int64_t i = 0; i < agreed; ++i) {
        const Token token = voters[0].at(depth);
        const double share = weight / (weight + kDoubt / (longest + depth)), chance = share * share;
        path *= chance;
        if (path < min_chance || token == kSeparator) return;
        node = tree.add(token, node, chance);
        ++depth;
      }
    }
    if (!tree.room()) return;
    std::vector<Camp> camps = camps_of(voters, depth);
    double total = 0.0;
    for (const Camp& camp : camps) total += camp.weight;
    total += kDoubt / (longest + depth);
    for (size_t i = 0; i < camps.size() && i < static_cast<size_t>(width); ++i) {
      const double share = camps[i].weight / total, chance = share * share;
      if (path * chance < min_chance) break;
      waiting.push_back({path * chance, ++age, node, chance, depth, std::move(camps[i])});
      std::push_heap(waiting.begin(), waiting.end());
    }
    if (waiting.empty()) return;
    std::pop_heap(waiting.begin(), waiting.end());
    Waiting next = std::move(waiting.back());
    waiting.pop_back();
    node = tree.add(next.camp.token, next.parent, next.chance);
    voters = std::move(next.camp.voters);
    path = next.path, depth = next.depth + 1;
  }
}

template <class Work>
int64_t guarded(Work work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return kFailed;
  }
}

}  // namespace

extern "C" {

Index* paceline_suffix_new(int64_t depth, int64_t block, int64_t slack) {
  try {
    return new Index(depth, block, slack);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void paceline_suffix_delete(Index* index) { delete index; }

int64_t paceline_suffix_open(Index* index, const Token* context, int64_t count) {
  return guarded([&] { return index->open(context, count), 0; });
}

int64_t paceline_suffix_extend(Index* index, const Token* tokens, int64_t count) {
  return guarded([&] { return index->extend(tokens, count), 0; });
}

int64_t paceline_suffix_evict(Index* index) {
  return guarded([&] { return index->evict(), 0; });
}

// Positions, documents, tokens that live documents take, length of the log.
void paceline_suffix_sizes(const Index* index, int64_t* sizes) {
  sizes[0] = index->size(), sizes[1] = index->documents();
  sizes[2] = index->held(), sizes[3] = index->log_length();
}

void paceline_suffix_trim(Index* index) { index->trim(0); }

void paceline_suffix_copy(const Index* index, Token* log, Token* positions, int64_t* spans) {
  index->copy(log, positions, spans);
}

// 1: restored; 0: the positions are not in order.
int64_t paceline_suffix_restore(Index* index, const Token* log, int64_t length, const Token* positions,
                                int64_t count, const int64_t* spans, int64_t documents) {
  return guarded([&] { return index->restore(log, length, positions, count, spans, documents) ? 1 : 0; });
}

// The best matches: their lengths, and `budget` tokens after each, [VOTERS, budget].
int64_t paceline_suffix_matches(const Index* own, const Index* past, const Token* after, int64_t count,
                                int64_t budget, int64_t* lengths, Token* following) {
  return guarded([&] {
    const std::vector<Match> matches = best_matches(*own, past, after, count);
    for (size_t i = 0; i < matches.size(); ++i) {
      lengths[i] = matches[i].length;
      const auto& log = *matches[i].log;
      for (int64_t step = 0; step < budget; ++step) {
        const size_t at = matches[i].position + step;
        *following++ = at < log.size() ? log[at] : kSeparator;
      }
    }
    return static_cast<int64_t>(matches.size());
  });
}

// What a draft may be, and where it goes.
struct Request {
  int64_t budget, width;
  double min_chance;
  Token* tokens;
  int32_t* parents;
  double* chances;
};

// Extends `own` by new tokens and drafts after them and `after`. Returns the number of nodes.
int64_t paceline_suffix_draft(Index* own, const Index* past, const Token* tokens, int64_t count,
                              const Token* after, int64_t after_count, const Request* request) {
  return guarded([&] {
    own->extend(tokens, count);
    const std::vector<Match> matches = best_matches(*own, past, after, after_count);
    Tree tree(request->budget, request->tokens, request->parents, request->chances);
    if (!matches.empty()) elect(matches, request->width, request->min_chance, tree);
    return static_cast<int64_t>(tree.size());
  });
}
}
