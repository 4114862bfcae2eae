#include "attention_work.h"

#include <algorithm>

namespace jaxkv {
namespace {

constexpr int64_t kFewTokens = 4;  // tiles of so few tokens wait for keys, not for arithmetic
constexpr int64_t kTasksPerThread = 4;

bool is_few(const QueryTile& tile) { return tile.tokens <= kFewTokens; }

// The pages that hold the keys of a split.
struct Pages {
  const int32_t* begin;
  const int32_t* end;

  Pages(const Attention& a, const QueryTile& tile, int64_t split)
      : begin(tile.pages + split * kSplitKeys / a.tokens_per_page),
        end(tile.pages + ((split + 1) * kSplitKeys + a.tokens_per_page - 1) / a.tokens_per_page) {}
  bool operator<(const Pages& other) const { return std::lexicographical_compare(begin, end, other.begin, other.end); }
  bool operator==(const Pages& other) const { return std::equal(begin, end, other.begin); }
};

}  // namespace

AttentionWork::AttentionWork(const Attention& a, const std::vector<QueryTile>& tiles, int64_t threads)
    : a_(a), begin_(tiles.data()), shared_(tiles.size()) {
  Tiles few;
  for (const QueryTile& tile : tiles)
    if (is_few(tile)) few.push_back(&tile);
  share_splits(few);
  int64_t keys = 0;
  for (const QueryTile* tile : few) keys += keys_of(*tile) - shared_keys(*tile);
  // Keys lie in the order of the heads: a task takes all of them, but no thread is to be without work.
  const int64_t wanted = kTasksPerThread * threads;
  const int64_t heads_of_few = static_cast<int64_t>(few.size()) >= wanted ? a.kv_heads : 1;
  for (const QueryTile& tile : tiles) {
    if (!is_few(tile)) {
      for (int64_t head = 0; head < a.kv_heads; ++head) tasks_.push_back({&tile, {head, 1}, -1, 0});
    } else if (heads_of_few == a.kv_heads && shared_keys(tile) == 0 && keys_of(tile) <= 2 * keys / wanted) {
      tasks_.push_back({&tile, {0, a.kv_heads}, -1, 0});
    } else {
      add_splits(tile, heads_of_few);
    }
  }
}

NextKeys AttentionWork::after(int64_t task) const {
  const auto next = static_cast<size_t>(task) + 1;
  if (next == tasks_.size()) return {};
  const auto& [tile, heads, split, sums] = tasks_[next];
  const HeadRange& before = tasks_[next - 1].heads;
  if (heads.first != before.first || heads.count != before.count) return {};
  const int64_t oldest = tile->oldest_key(a_.window);
  return {tile, split < 0 ? oldest : std::max(oldest, split * kSplitKeys)};
}

// A tile in tasks of one split each, those that it shares left out.
void AttentionWork::add_splits(const QueryTile& tile, int64_t heads) {
  const std::vector<SplitPlace>& shared = shared_[static_cast<size_t>(&tile - begin_)];
  const int64_t first = tile.oldest_key(a_.window) / kSplitKeys + static_cast<int64_t>(shared.size());
  const int64_t last = (tile.end_key() + kSplitKeys - 1) / kSplitKeys;
  const bool whole = shared.empty() && last - first < 2;
  if (!whole) {
    merges_.push_back({&tile, places_.size(), places_.size() + shared.size() + static_cast<size_t>(last - first)});
    places_.insert(places_.end(), shared.begin(), shared.end());
  }
  const int64_t head_floats = kernels().partial_size(a_, tile.tokens);
  for (int64_t split = first; split < last; ++split) {
    const int64_t sums = whole ? 0 : take_sums(tile.tokens);
    for (int64_t head = 0; head < a_.kv_heads; head += heads)
      tasks_.push_back({&tile, {head, heads}, whole ? -1 : split, sums + head * head_floats});
    if (!whole) places_.push_back({sums, head_floats, tile.tokens * (a_.heads / a_.kv_heads), 0});
  }
}

// Room for the sums of one split of so many tokens; where those of head 0 begin.
int64_t AttentionWork::take_sums(int64_t tokens) {
  const int64_t sums = floats_;
  floats_ += a_.kv_heads * kernels().partial_size(a_, tokens);
  return sums;
}

void AttentionWork::share_splits(const Tiles& few) {
  if (a_.window > 0) return;  // a split is then not seen whole
  Tiles able = few;
  for (int64_t split = 0; able.size() > 1; ++split) {
    // Those that see all of the split.
    able.erase(std::remove_if(able.begin(), able.end(),
                              [&](const QueryTile* tile) { return tile->position + 1 < (split + 1) * kSplitKeys; }),
               able.end());
    const auto pages = [&](const QueryTile* tile) { return Pages(a_, *tile, split); };
    std::stable_sort(able.begin(), able.end(),
                     [&](const QueryTile* left, const QueryTile* right) { return pages(left) < pages(right); });
    Tiles sharing;
    for (auto first = able.begin(); first < able.end();) {
      int64_t tokens = (*first)->tokens;
      auto last = first + 1;
      while (last < able.end() && pages(*last) == pages(*first) &&
             (tokens + (*last)->tokens) * (a_.heads / a_.kv_heads) <= kTileQueries) {
        tokens += (*last++)->tokens;
      }
      if (last - first > 1) {
        share_split(Tiles(first, last), split);
        sharing.insert(sharing.end(), first, last);
      }
      first = last;
    }
    able = std::move(sharing);
  }
}

void AttentionWork::share_split(const Tiles& members, int64_t split) {
  const int64_t group = a_.heads / a_.kv_heads, end = (split + 1) * kSplitKeys;
  std::vector<int32_t>& tokens = members_.emplace_back();
  for (const QueryTile* tile : members)
    for (int64_t i = 0; i < tile->tokens; ++i) tokens.push_back(static_cast<int32_t>(tile->token(i)));
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t sums = take_sums(count), head_floats = kernels().partial_size(a_, count);
  together_.push_back({0, count, end - 1, end, members[0]->pages, tokens.data()});
  for (int64_t head = 0; head < a_.kv_heads; ++head)
    tasks_.push_back({&together_.back(), {head, 1}, split, sums + head * head_floats});
  int64_t first_row = 0;
  for (const QueryTile* tile : members) {
    shared_[static_cast<size_t>(tile - begin_)].push_back({sums, head_floats, count * group, first_row});
    first_row += tile->tokens * group;
  }
}

}  // namespace jaxkv
