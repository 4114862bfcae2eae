#include "attention_plan.h"

#include <algorithm>
#include <memory>

namespace jaxkv {
namespace {

int64_t pages_used(const Attention& a, int64_t kv_len) { return (kv_len + a.tokens_per_page - 1) / a.tokens_per_page; }

bool same(const std::vector<int32_t>& kept, const int32_t* given, int64_t count) {
  return static_cast<int64_t>(kept.size()) == count && std::equal(kept.begin(), kept.end(), given);
}

}  // namespace

const AttentionPlan* AttentionPlan::of(Checker& check, const Attention& a, const AttentionRows& rows,
                                       int64_t num_pages, int64_t threads) {
  // Layers with a window may alternate with layers without.
  static thread_local std::unique_ptr<AttentionPlan> kept[2];
  std::unique_ptr<AttentionPlan>& plan = kept[a.window > 0];
  if (plan == nullptr || !plan->serves(a, rows, threads)) {
    if (!check_rows(check, a, rows)) return nullptr;
    plan.reset(new AttentionPlan(a, rows, threads));
  }
  return plan->check_pages(check, a.first_page, num_pages) ? plan.get() : nullptr;
}

AttentionPlan::AttentionPlan(const Attention& a, const AttentionRows& rows, int64_t threads)
    : level_(&kernels()),
      sizes_(a),
      tokens_(rows.tokens),
      threads_(threads),
      query_start_(rows.query_start, rows.query_start + rows.rows + 1),
      kv_len_(rows.kv_len, rows.kv_len + rows.rows),
      page_start_(rows.page_start, rows.page_start + rows.rows),
      page_ids_(rows.page_ids, rows.page_ids + rows.entries),
      tiles_(cut_rows()),
      work_(sizes_, tiles_, threads) {}

bool AttentionPlan::serves(const Attention& a, const AttentionRows& rows, int64_t threads) const {
  return level_ == &kernels() && sizes_.heads == a.heads && sizes_.kv_heads == a.kv_heads &&
         sizes_.head_dim == a.head_dim && sizes_.tokens_per_page == a.tokens_per_page && sizes_.window == a.window &&
         sizes_.q_type == a.q_type && sizes_.pool_type == a.pool_type && tokens_ == rows.tokens &&
         threads_ == threads && same(query_start_, rows.query_start, rows.rows + 1) &&
         same(kv_len_, rows.kv_len, rows.rows) && same(page_start_, rows.page_start, rows.rows) &&
         same(page_ids_, rows.page_ids, rows.entries);
}

// Rows without a query have nothing to be checked.
bool AttentionPlan::check_rows(Checker& check, const Attention& a, const AttentionRows& rows) {
  if (!check.require(rows.query_start[0] == 0, "query_start begins at ", rows.query_start[0], ", wanted 0"))
    return false;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t first = rows.query_start[row], queries = rows.query_start[row + 1] - first;
    if (queries == 0) continue;
    const int64_t length = rows.kv_len[row], entry = rows.page_start[row], end = entry + pages_used(a, length);
    if (!check.require(first >= 0 && queries > 0 && first + queries <= rows.tokens, "row ", row, " has queries ", first,
                       " to ", first + queries, " of ", rows.tokens) ||
        !check.require(length >= queries, "row ", row, " has kv_len ", length, " for ", queries, " queries") ||
        !check.require(entry >= 0 && end <= rows.entries, "row ", row, " needs page entries ", entry, " to ", end,
                       " of ", rows.entries)) {
      return false;
    }
  }
  const int64_t end = rows.query_start[rows.rows];
  return check.require(end >= 0 && end <= rows.tokens, "query_start ends at ", end, " of ", rows.tokens, " tokens");
}

bool AttentionPlan::check_pages(Checker& check, int64_t first_page, int64_t num_pages) const {
  return tiles_.empty() || (check.index("page", lowest_page_ + first_page, num_pages) &&
                            check.index("page", highest_page_ + first_page, num_pages));
}

// Tiles of query tokens, those of every row, the longest first: so that no thread is left alone with one at the end.
std::vector<QueryTile> AttentionPlan::cut_rows() {
  const int64_t width = std::max<int64_t>(1, kTileQueries / (sizes_.heads / sizes_.kv_heads));
  std::vector<QueryTile> tiles;
  for (size_t row = 0; row < kv_len_.size(); ++row) {
    const int64_t first = query_start_[row], queries = query_start_[row + 1] - first, length = kv_len_[row];
    if (queries == 0) continue;
    const int32_t* pages = page_ids_.data() + page_start_[row];
    const auto [low, high] = std::minmax_element(pages, pages + pages_used(sizes_, length));
    lowest_page_ = tiles.empty() ? *low : std::min(lowest_page_, *low);
    highest_page_ = tiles.empty() ? *high : std::max(highest_page_, *high);
    for (int64_t offset = 0; offset < queries; offset += width)
      tiles.push_back({first + offset, std::min(width, queries - offset), length - queries + offset, length, pages});
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const QueryTile& a, const QueryTile& b) {
    return a.tokens * (a.position + a.tokens) > b.tokens * (b.position + b.tokens);
  });
  return tiles;
}

}  // namespace jaxkv
