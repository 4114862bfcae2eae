// paged_attention: ragged rows cut into tiles of query tokens, every tile and K/V head a task.

#include <algorithm>

#include "append.h"
#include "attention_plan.h"
#include "operands.h"
#include "parallel.h"

namespace jaxkv {
namespace {

void clear_tokens_without_row(const Attention& a, const AttentionRows& rows) {
  const int64_t token_bytes = a.heads * a.head_dim * element_size(a.q_type);
  char* out = static_cast<char*>(a.out);
  std::fill(out + rows.query_start[rows.rows] * token_bytes, out + rows.tokens * token_bytes, char{0});
}

// The arrays of a call's plan, of layer 0.
struct Plan {
  ffi::AnyBuffer query_start, kv_len, page_start, page_ids;
};

void attend_tiles(ffi::ThreadPool& pool, const Attention& a, const AttentionWork& work) {
  const Kernels& level = kernels();
  float* sums = thread_scratch(Slot::kInput, work.floats());
  parallel_for(pool, static_cast<int64_t>(work.tasks().size()), [&](int64_t index) {
    const AttentionTask& task = work.tasks()[static_cast<size_t>(index)];
    float* scratch = thread_scratch(Slot::kTask, task.heads.count * level.attend_scratch(a, task.tile->tokens));
    if (task.split < 0) {
      level.attend(a, *task.tile, task.heads, work.after(index), scratch);
    } else {
      level.attend_split(a, *task.tile, task.heads, task.split, work.after(index), sums + task.sums, scratch);
    }
  });
  parallel_for(pool, static_cast<int64_t>(work.merges().size()), [&](int64_t index) {
    const AttentionMerge& merge = work.merges()[static_cast<size_t>(index)];
    float* scratch = thread_scratch(Slot::kTask, level.attend_scratch(a, merge.tile->tokens));
    for (int64_t head = 0; head < a.kv_heads; ++head)
      level.merge_splits(a, *merge.tile, head, sums, work.places() + merge.first, work.places() + merge.last, scratch);
  });
}

// Attends all rows of the plan; `a` has everything but what the buffers say.
ffi::Error attend_rows(Checker& check, ffi::ThreadPool& pool, Attention a, const ffi::AnyBuffer& q,
                       const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const Plan& plan, const ffi::AnyBuffer& out) {
  if (!check.shape("q", q, {kAny, kAny, kAny}) || !check.floating("q", q, &a.q_type) ||
      !check.shape("k_pool", k, {kAny, kAny, kAny, q.dimensions()[2]}) ||
      !check.floating("k_pool", k, &a.pool_type)) {
    return check.error();
  }
  const auto sizes = k.dimensions();
  const int64_t tokens = q.dimensions()[0];
  if (!check.shape("v_pool", v, {sizes[0], sizes[1], sizes[2], sizes[3]}) ||
      !check.dtype("v_pool", v, k.element_type()) || !check.shape("kv_len", plan.kv_len, {kAny}) ||
      !check.dtype("kv_len", plan.kv_len, ffi::DataType::S32) ||
      !check.shape("query_start", plan.query_start, {plan.kv_len.dimensions()[0] + 1}) ||
      !check.dtype("query_start", plan.query_start, ffi::DataType::S32) ||
      !check.shape("page_start", plan.page_start, {plan.kv_len.dimensions()[0]}) ||
      !check.dtype("page_start", plan.page_start, ffi::DataType::S32) ||
      !check.shape("page_ids", plan.page_ids, {kAny}) || !check.dtype("page_ids", plan.page_ids, ffi::DataType::S32) ||
      !check.shape("result", out, {tokens, q.dimensions()[1], q.dimensions()[2]}) ||
      !check.dtype("result", out, q.element_type()) ||
      !check.require(sizes[1] > 0 && sizes[2] > 0 && sizes[3] > 0 && q.dimensions()[1] % sizes[2] == 0,
                     q.dimensions()[1], " heads are not a multiple of the heads of pools ", k)) {
    return check.error();
  }
  a.q = q.untyped_data();
  a.k = k.untyped_data();
  a.v = v.untyped_data();
  a.out = out.untyped_data();
  a.heads = q.dimensions()[1];
  a.kv_heads = sizes[2];
  a.head_dim = sizes[3];
  a.tokens_per_page = sizes[1];
  const auto array = [](const ffi::AnyBuffer& buffer) { return static_cast<const int32_t*>(buffer.untyped_data()); };
  const AttentionRows rows{array(plan.query_start), array(plan.kv_len), array(plan.page_start), array(plan.page_ids),
                           plan.kv_len.dimensions()[0], plan.page_ids.dimensions()[0], tokens};
  const AttentionPlan* cut = AttentionPlan::of(check, a, rows, sizes[0], thread_count(pool));
  if (cut == nullptr) return check.error();
  clear_tokens_without_row(a, rows);
  attend_tiles(pool, a, cut->work());
  return ffi::Error::Success();
}

// q [tokens, heads, head_dim]; pools [pages, tokens_per_page, kv_heads, head_dim]; first_page i32 [], the pool row of
// the layer's page 0; query_start i32 [rows + 1]; kv_len, page_start i32 [rows]; page_ids i32 [entries], of layer 0.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::AnyBuffer first_page, ffi::AnyBuffer query_start, ffi::AnyBuffer kv_len,
                     ffi::AnyBuffer page_start, ffi::AnyBuffer page_ids, ffi::Result<ffi::AnyBuffer> out, float scale,
                     float soft_cap, int64_t window) {
  Checker check("paged_attention");
  if (!check.shape("first_page", first_page, {}) || !check.dtype("first_page", first_page, ffi::DataType::S32))
    return check.error();
  Attention a{};
  a.first_page = *static_cast<const int32_t*>(first_page.untyped_data());
  a.scale = scale;
  a.soft_cap = soft_cap;
  a.window = window;
  return attend_rows(check, pool, a, q, k, v, {query_start, kv_len, page_start, page_ids}, *out);
}

// A layer's whole step in the cache: pages cleared and copied, k and v turned and appended, q turned and attended.
//
// q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; cos, sin f32 [tokens, pairs], 0 pairs for no rotation;
// layer i32 []; slots i32 [tokens]; scrub i32 [entries], -1 for none; copy_sources, copy_targets i32 [rows], target -1
// for none; the plan as above; all slots and pages of layer 0. The pools are the same buffers as their results.
ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer cos,
                  ffi::AnyBuffer sin, ffi::AnyBuffer layer, ffi::AnyBuffer slots, ffi::AnyBuffer scrub,
                  ffi::AnyBuffer copy_sources, ffi::AnyBuffer copy_targets, ffi::AnyBuffer query_start,
                  ffi::AnyBuffer kv_len, ffi::AnyBuffer page_start, ffi::AnyBuffer page_ids, ffi::AnyBuffer k_pool,
                  ffi::AnyBuffer v_pool, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> k_out,
                  ffi::Result<ffi::AnyBuffer> v_out, int64_t num_pages, float scale, float soft_cap, int64_t window) {
  Checker check("attend");
  Attention a{};
  if (!check.shape("layer", layer, {}) || !check.dtype("layer", layer, ffi::DataType::S32) ||
      !check.shape("q", q, {kAny, kAny, kAny}) || !check.shape("k", k, {q.dimensions()[0], kAny, kAny}) ||
      !check.shape("cos", cos, {q.dimensions()[0], kAny}) ||
      !check.dtype("cos", cos, ffi::DataType::F32) ||
      !check.shape("sin", sin, {q.dimensions()[0], cos.dimensions()[1]}) ||
      !check.dtype("sin", sin, ffi::DataType::F32) ||
      !check.require(2 * cos.dimensions()[1] <= q.dimensions()[2], cos.dimensions()[1],
                     " rotated pairs do not fit a head of ", q.dimensions()[2])) {
    return check.error();
  }
  a.first_page = *static_cast<const int32_t*>(layer.untyped_data()) * num_pages;
  a.scale = scale;
  a.soft_cap = soft_cap;
  a.window = window;
  a.rotated = cos.dimensions()[1];
  if (a.rotated > 0) {
    a.cos = static_cast<const float*>(cos.untyped_data());
    a.sin = static_cast<const float*>(sin.untyped_data());
  }
  if (!prepare_pages(check, pool, scrub, copy_sources, copy_targets, a.first_page, num_pages, k_pool, v_pool) ||
      !append_tokens(check, pool, k, v, slots, a, num_pages, k_pool, v_pool, *k_out, *v_out)) {
    return check.error();
  }
  return attend_rows(check, pool, a, q, k_pool, v_pool, {query_start, kv_len, page_start, page_ids}, *out);
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_paged_attention(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_paged_attention, jaxkv::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_attend(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_attend, jaxkv::attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("num_pages")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));
