// What the attention of a call is cut into, kept from call to call: the layers of a step have the same rows and pages, and
// the work of cutting them would be as much for each.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_work.h"
#include "operands.h"

namespace jaxkv {

// The rows of a call, arrays of layer 0: query_start [rows + 1]; kv_len, page_start [rows]; page_ids [entries].
struct AttentionRows {
  const int32_t *query_start, *kv_len, *page_start, *page_ids;
  int64_t rows, entries;
  int64_t tokens;  // of the call, those of no row included
};

class AttentionPlan {
 public:
  // The plan of a call, or null after a complaint. It stands until the same thread asks again.
  static const AttentionPlan* of(Checker& check, const Attention& a, const AttentionRows& rows, int64_t num_pages,
                                 int64_t threads);

  const AttentionWork& work() const { return work_; }

 private:
  AttentionPlan(const Attention& a, const AttentionRows& rows, int64_t threads);

  bool serves(const Attention& a, const AttentionRows& rows, int64_t threads) const;
  static bool check_rows(Checker& check, const Attention& a, const AttentionRows& rows);
  bool check_pages(Checker& check, int64_t first_page, int64_t num_pages) const;
  std::vector<QueryTile> cut_rows();

  const Kernels* level_;
  Attention sizes_;  // of which none of the arrays
  int64_t tokens_, threads_;
  std::vector<int32_t> query_start_, kv_len_, page_start_, page_ids_;
  int32_t lowest_page_ = 0, highest_page_ = 0;  // of those that are read
  std::vector<QueryTile> tiles_;
  AttentionWork work_;
};

}  // namespace jaxkv
