// What a step does to the pools before it reads them.
#pragma once

#include "operands.h"

namespace jaxkv {

// Clears the pages `scrub` and copies `copy_sources` to `copy_targets`, in the layer whose page 0 is pool row
// `first_page`; -1 is no page. False with a complaint where a page is outside the layer or its pools.
bool prepare_pages(Checker& check, ffi::ThreadPool& pool, const ffi::AnyBuffer& scrub,
                   const ffi::AnyBuffer& copy_sources, const ffi::AnyBuffer& copy_targets, int64_t first_page,
                   int64_t num_pages, const ffi::AnyBuffer& k_pool, const ffi::AnyBuffer& v_pool);

// Writes k, turned as `a` says, and v [tokens, kv_heads, head_dim] to `slots` [tokens] of that layer; slots outside its
// `num_pages` pages write nothing. False with a complaint where the operands do not fit.
bool append_tokens(Checker& check, ffi::ThreadPool& pool, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                   const ffi::AnyBuffer& slots, const Attention& a, int64_t num_pages, const ffi::AnyBuffer& k_pool,
                   const ffi::AnyBuffer& v_pool, const ffi::AnyBuffer& k_out, const ffi::AnyBuffer& v_out);

}  // namespace jaxkv
