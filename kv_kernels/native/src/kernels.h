// The kernels that every instruction set provides, and what they take: plain data, already checked.
//
// What a level is made of is in anonymous namespaces: of an inline function that several levels have, the linker would take
// one copy for all, compiled for one of them.
//
// A kernel's result for one token is the same bits whatever stands beside it: each output is reduced in one order that
// depends on the sizes of the weight (or the positions of the keys) and on the instruction set, on nothing else.
#pragma once

#include <cstdint>
#include <functional>

namespace jaxkv {

enum class Element { kF32, kF16, kBF16 };
// kQ8_0, kQ4_0 and kQ4_1 have a float16 for every block of 32, and so have kQ4_0Tiles and kQ4_1Tiles, of which sixteen
// rows lie together, see WeightTile. The others have numbers for groups of any size, to be multiplied by small integers or
// not: kBytes, kNibbles, kFiveBits, kSixBits by what a quant takes, kFloat8 by e4m3.
enum class WeightKind {
  kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1, kQ4_0Tiles, kQ4_1Tiles, kBytes, kNibbles, kFiveBits, kSixBits, kFloat8
};

constexpr int64_t kQuantBlock = 32;     // elements that share a scale
constexpr int64_t kMaxPanel = 768;      // elements of `in` reduced in one run; such runs are added in order
constexpr int64_t kTokenBlock = 256;    // most tokens that one call of a product takes
constexpr int64_t kOutputBlock = 64;    // outputs that share a block of results
constexpr int64_t kRowGroup = 4;        // weight rows that are multiplied together
constexpr int64_t kUnpackedGroups = 2;  // row groups that are unpacked together
constexpr int64_t kKeyBlock = 64;       // keys that share a rescaling of the softmax, counted from position 0
constexpr int64_t kSplitKeys = 512;     // keys whose sums are taken apart and then merged, counted from position 0
constexpr int64_t kStridePadding = 16;  // floats between packed rows, against cache-set conflicts

// Sixteen rows of four-bit weights, block after block: the quants of a block of every row, then those of the next, and
// apart from them the scales (or mins) of a block of every row, then those of the next. Scales lie in the order of the
// rows. Quants lie in the order in which vectors turn them: what four rows that are four apart have is one vector.
struct WeightTile {
  static constexpr int64_t kRows = 16;
  static constexpr int64_t kQuantBytes = 16;  // of a row's block
  static constexpr int64_t kBlockBytes = kRows * kQuantBytes;
  // Where a row's quants lie in a block.
  static constexpr int64_t offset(int64_t row) { return (row % 4 * 4 + row / 4) * kQuantBytes; }
};
constexpr bool in_tiles(WeightKind kind) { return kind == WeightKind::kQ4_0Tiles || kind == WeightKind::kQ4_1Tiles; }
// The kind with the same quants, row by row.
constexpr WeightKind row_kind(WeightKind kind) {
  return kind == WeightKind::kQ4_0Tiles   ? WeightKind::kQ4_0
         : kind == WeightKind::kQ4_1Tiles ? WeightKind::kQ4_1
                                          : kind;
}

// Whether quants are small integers times a scale a block, which some levels multiply as integers.
constexpr bool has_integers(WeightKind kind) {
  const WeightKind row = row_kind(kind);
  return row == WeightKind::kQ8_0 || row == WeightKind::kQ4_0 || row == WeightKind::kQ4_1 || row == WeightKind::kNibbles;
}

// Numbers of groups of a row's blocks, f16 or f32 [out, in/32 / group_blocks], each times the integers int8 [out, in/32]
// ([out, in/16] where a block has two) of its group, or as they are where there are none.
struct GroupNumbers {
  const void* numbers;  // null for none
  Element type;
  int64_t group_blocks;
  const int8_t* factors;
};

// One matrix [out, in] in its storage: dense values, or quants with scales and mins.
struct WeightView {
  WeightKind kind;
  int64_t out_features;
  int64_t in_features;
  const void* values;
  const uint16_t* scales;  // f16 [out, in/32], or by tiles, of the kinds that have one for every block
  const uint16_t* mins;    // the same; q4_1 alone, in rows or tiles
  // Of the other kinds: what lies above the low four bits of quants, a word of 32 bits a block and bit, the lower bit
  // first; scales; mins, or what is taken off every quant where there are none.
  const uint8_t* high_bits;
  GroupNumbers group_scales;
  GroupNumbers group_mins;
  float offset;
};

// What a gated product does to the first of its two results.
enum class Activation { kNone, kSilu, kGeluTanh };

// Paged attention of one call; q and out are [tokens, heads, head_dim], pools [pages, tokens_per_page, kv_heads, head_dim].
struct Attention {
  const void* q;
  Element q_type;
  const void* k;
  const void* v;
  Element pool_type;
  void* out;       // of q_type
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t tokens_per_page;
  int64_t first_page;
  float scale;
  float soft_cap;  // 0 for none
  int64_t window;  // 0 for none
  const float* cos;  // [tokens, rotated], or null where q is rotated already
  const float* sin;
  int64_t rotated;  // pairs (i, i + rotated) of a head that turn
};

// Query tokens that follow each other in one row, and the row's pages.
struct QueryTile {
  int64_t first_token;
  int64_t tokens;
  int64_t position;      // of the first token
  int64_t kv_len;
  const int32_t* pages;  // of layer 0
  const int32_t* members = nullptr;  // its tokens, where they do not follow each other

  int64_t token(int64_t index) const { return members == nullptr ? first_token + index : members[index]; }
  // Keys before and after these are seen by none of the tile.
  int64_t oldest_key(int64_t window) const { return window > 0 && position >= window ? position - window + 1 : 0; }
  int64_t end_key() const { return position + tokens < kv_len ? position + tokens : kv_len; }
};

// Where the sums of a tile over one split are, among those of all that was computed with it.
struct SplitPlace {
  int64_t sums;  // of head 0, in floats
  int64_t head_floats;
  int64_t rows;
  int64_t first_row;
};

// K/V heads of a task. Their keys lie side by side: few tokens are done with a block of them soonest together.
struct HeadRange {
  int64_t first, count;
};

// Keys of a tile, from `first` on, that a thread is going to read next; no tile for none.
struct NextKeys {
  const QueryTile* tile;
  int64_t first;
};

// Tokens [first, first + count) of a block: [count][in_features]. They last until the next call.
using TokenRows = std::function<const float*(int64_t first, int64_t count)>;

// One of `count` parts of equal size.
struct Part {
  int64_t index, count;

  // Where it begins and ends in `all` things.
  int64_t begin(int64_t all) const { return all * index / count; }
  int64_t end(int64_t all) const { return all * (index + 1) / count; }
};

// What is done with a product's results on their way, and where they go, as bfloat16: both arrays are [tokens][stride].
struct Finish {
  const float* bias;       // of the weight, [out], or null
  const float* gate_bias;  // of the gate's weight, or null
  Activation activation;
  const void* residual;  // of the first token, or null
  void* out;             // the same
  int64_t stride;
};

// Products of one precision with weights of every kind.
struct ProductKernels {
  int64_t token_block;  // tokens that are best given in one call, at most kTokenBlock
  // Floats that `pack` fills for a block of tokens that a product with `weight` will read.
  int64_t (*packed_size)(const WeightView& weight, int64_t tokens);
  // A part of a block of tokens into the form that `product` reads; the same for all weights of one kind and in_features.
  // Asks for few tokens at a time, so that they are packed while they are in a cache.
  void (*pack)(const WeightView& weight, const TokenRows& x, int64_t tokens, Part part, float* packed);
  // results [tokens][kOutputBlock] of outputs first_output to first_output + outputs, at most kOutputBlock of them. Other
  // numbers of these rows, and of rows up to a multiple of 16, may be overwritten.
  void (*product)(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                  float* results);
  // Of levels that have them, else null: `pack` of rows of bfloat16 that are taken as they are, [tokens][in_features]; and
  // `product` of any number of outputs, gated by that of another weight if there is one, which finishes as it goes.
  void (*pack_narrow)(const WeightView& weight, const void* x, int64_t tokens, Part part, float* packed) = nullptr;
  void (*finished_product)(const WeightView& weight, const WeightView* gate, const float* packed, int64_t tokens,
                           int64_t first_output, int64_t outputs, const Finish& finish) = nullptr;
};

struct Kernels {
  const char* name;
  ProductKernels products;       // to float32's accuracy
  // Of x in bfloat16: the same, or what is faster: both sides rounded to it, or x as integers of 16 bits a block with
  // weights that have integers.
  ProductKernels bf16_products;
  // Of x that may be rounded to 8 bits a block, with weights that have integers; none where that is not faster.
  ProductKernels int8_products;
  // Where the largest of `count` numbers is, the first of equals, if it is above *best, which it then becomes; else -1.
  // nan is less than all, infinity the largest float.
  int64_t (*argmax)(const float* x, int64_t count, float* best);
  // x / sqrt(mean(x^2) + eps) * weight.
  void (*normalize)(const float* x, const float* weight, int64_t count, float eps, float* out);
  // Pairs (i, i + count) of x turned by the angles whose cosines and sines are given.
  void (*rotate)(const float* cos, const float* sin, int64_t count, float* x);
  // gate = activation(gate) * up; both have room for `count` rounded up to 16.
  void (*gate)(Activation activation, const float* up, int64_t count, float* gate);
  void (*attend)(const Attention&, const QueryTile&, HeadRange, NextKeys, float* scratch);
  // The sums over the keys of split `split` alone go to `partials`, `partial_size` floats a head.
  void (*attend_split)(const Attention&, const QueryTile&, HeadRange, int64_t split, NextKeys, float* partials,
                       float* scratch);
  // What `attend` gives for one head, from the sums of all of a tile's splits, in order.
  void (*merge_splits)(const Attention&, const QueryTile&, int64_t kv_head, const float* sums, const SplitPlace* first,
                       const SplitPlace* last, float* scratch);
  int64_t (*partial_size)(const Attention&, int64_t tokens);
  // Floats of scratch, aligned to 64 bytes, that `attend` needs for a head of a tile of so many tokens.
  int64_t (*attend_scratch)(const Attention&, int64_t tokens);
  void (*unpack_row)(const WeightView&, int64_t row, float* out);
  void (*widen)(const void* from, Element, int64_t count, float* out);
  void (*narrow)(const float* from, int64_t count, Element, void* out);
};

const Kernels& generic_kernels();
#ifdef JAXKV_X86
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

// The kernels in use: the best that the CPU has, or what jaxkv_set_level chose.
const Kernels& kernels();

inline int64_t panel_count(int64_t in_features) { return in_features <= kMaxPanel ? 1 : (in_features + kMaxPanel - 1) / kMaxPanel; }

// Panels of about equal length, at most kMaxPanel; a function of `in` alone, since it decides the order of the sums.
inline int64_t panel_length(int64_t in_features) {
  const int64_t panels = panel_count(in_features);
  const int64_t even = (in_features + panels - 1) / panels;
  return (even + kQuantBlock - 1) / kQuantBlock * kQuantBlock;
}

inline int64_t element_size(Element element) { return element == Element::kF32 ? 4 : 2; }

}  // namespace jaxkv
