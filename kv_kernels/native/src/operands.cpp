#include "operands.h"

#include <algorithm>

namespace jaxkv {

std::string text(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32: return "float32";
    case ffi::DataType::F16: return "float16";
    case ffi::DataType::BF16: return "bfloat16";
    case ffi::DataType::F64: return "float64";
    case ffi::DataType::S8: return "int8";
    case ffi::DataType::U8: return "uint8";
    case ffi::DataType::S32: return "int32";
    case ffi::DataType::S64: return "int64";
    case ffi::DataType::F8E4M3FN: return "float8_e4m3fn";
    default: return "another dtype";
  }
}

namespace {

// Sizes as a shape; kAny is written as any.
template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string shape = "[";
  for (const int64_t size : sizes) {
    if (shape.size() > 1) shape += ", ";
    shape += size == kAny ? "any" : std::to_string(size);
  }
  return shape + "]";
}

}  // namespace

std::string text(const ffi::AnyBuffer& buffer) { return shape_text(buffer.dimensions()); }

bool Checker::shape(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> sizes) {
  const auto actual = buffer.dimensions();
  const bool same = actual.size() == sizes.size() &&
                    std::equal(sizes.begin(), sizes.end(), actual.begin(),
                               [](int64_t wanted, int64_t size) { return wanted == kAny || wanted == size; });
  return same || require(false, name, " has shape ", buffer, ", wanted ", shape_text(sizes));
}

bool Checker::dtype(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType wanted) {
  const ffi::DataType actual = buffer.element_type();
  return require(actual == wanted, name, " is ", actual, ", wanted ", wanted);
}

bool Checker::floating(const char* name, const ffi::AnyBuffer& buffer, Element* element) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: *element = Element::kF32; return true;
    case ffi::DataType::F16: *element = Element::kF16; return true;
    case ffi::DataType::BF16: *element = Element::kBF16; return true;
    default:
      return require(false, name, " is ", buffer.element_type(), ", wanted float32, float16 or bfloat16");
  }
}

bool Checker::index(const char* name, int64_t value, int64_t limit) {
  return require(value >= 0 && value < limit, name, " ", value, " is outside 0 to ", limit - 1);
}

namespace {

// What a kind of weight is made of: the arrays weight, scales, mins, high_bits, scale_factors, min_factors, in this order.
struct Form {
  std::string_view name;
  WeightKind plain;  // with a float16 for every block
  WeightKind grouped;
  ffi::DataType quants;  // nibbles where uint8
  float offset;          // taken off every quant
  bool has_mins;
  int64_t high_bits;      // of a quant
  int64_t block_factors;  // of scales, and of mins where there are any
};

constexpr auto kU8 = ffi::DataType::U8, kS8 = ffi::DataType::S8, kF8 = ffi::DataType::F8E4M3FN;
constexpr auto kFive = WeightKind::kFiveBits, kSix = WeightKind::kSixBits;
constexpr Form kForms[] = {
    {"q8_0", WeightKind::kQ8_0, WeightKind::kBytes, kS8, 0, false, 0, 0},
    {"q4_0", WeightKind::kQ4_0, WeightKind::kNibbles, kU8, 8, false, 0, 0},
    {"q4_1", WeightKind::kQ4_1, WeightKind::kNibbles, kU8, 0, true, 0, 0},
    {"q5_0", kFive, kFive, kU8, 16, false, 1, 0},
    {"q5_1", kFive, kFive, kU8, 0, true, 1, 0},
    {"q4_k", WeightKind::kNibbles, WeightKind::kNibbles, kU8, 0, true, 0, 1},
    {"q5_k", kFive, kFive, kU8, 0, true, 1, 1},
    {"q6_k", kSix, kSix, kU8, 32, false, 2, 2},
    {"f8_e4m3", WeightKind::kFloat8, WeightKind::kFloat8, kF8, 0, false, 0, 0},
};

}  // namespace

PartReader::PartReader(Checker& check, const ffi::AnyBuffer& layer, const ffi::RemainingArgs& parts)
    : check_(check), layer_(layer), parts_(parts) {
  if (check.shape("layer", layer, {}) && check.dtype("layer", layer, ffi::DataType::S32))
    picked_ = *static_cast<const int32_t*>(layer.untyped_data());
}

ffi::AnyBuffer PartReader::array(const char* name) {
  const auto part = next_ < parts_.size() ? parts_.get<ffi::AnyBuffer>(next_) : ffi::Unexpected(ffi::Error::Internal(""));
  check_.require(part.has_value(), name, " is missing, or is not an array: ", parts_.size(), " parts are given");
  ++next_;
  return part.has_value() ? *part : layer_;
}

const float* PartReader::vector(const char* name, int64_t size) {
  const ffi::AnyBuffer part = array(name);
  if (check_.failed()) return nullptr;
  const auto sizes = part.dimensions();
  if (!check_.require(sizes.size() == 1 || sizes.size() == 2, name, " has shape ", part,
                      ", wanted [size] or [layers, size]") ||
      !check_.require(sizes[sizes.size() - 1] == size, name, " has shape ", part, ", wanted ", size,
                      " numbers a layer") ||
      !check_.dtype(name, part, ffi::DataType::F32)) {
    return nullptr;
  }
  const auto* data = static_cast<const float*>(part.untyped_data());
  if (sizes.size() == 1) return data;
  return check_.index("layer", picked_, sizes[0]) ? data + picked_ * size : nullptr;
}

void PartReader::require_all_read() {
  check_.require(next_ == parts_.size(), parts_.size(), " parts are given, ", next_, " are called for");
}

WeightView PartReader::weight(std::string_view kind) {
  WeightView view{};
  if (check_.failed()) return view;
  if (kind == "dense") return dense_weight();
  if (kind == "q4_0_tiles") return weight_tiles(WeightKind::kQ4_0Tiles);
  if (kind == "q4_1_tiles") return weight_tiles(WeightKind::kQ4_1Tiles);
  const Form* form = nullptr;
  for (const Form& each : kForms)
    if (each.name == kind) form = &each;
  if (!check_.require(form != nullptr, "weight kind ", kind, " is not one that is implemented")) return view;
  const MatrixPart quants = matrix("weight", {form->quants});
  if (check_.failed() || !check_.index("layer", picked_, quants.layers)) return view;
  const bool nibbles = form->quants == ffi::DataType::U8;
  view.out_features = quants.rows;
  view.in_features = nibbles ? 2 * quants.columns : quants.columns;
  view.values = quants.data + picked_ * quants.rows * quants.columns;
  view.offset = form->offset;
  view.group_scales = group_numbers("scales", view, quants.layers);
  if (form->has_mins) view.group_mins = group_numbers("mins", view, quants.layers);
  const int64_t blocks = view.in_features / kQuantBlock;
  if (form->high_bits > 0) {
    view.high_bits = reinterpret_cast<const uint8_t*>(
        block_bytes("high_bits", ffi::DataType::U8, view, quants.layers, blocks * 4 * form->high_bits));
  }
  if (form->block_factors > 0) {
    const auto factors = [&](const char* name) {
      return reinterpret_cast<const int8_t*>(
          block_bytes(name, ffi::DataType::S8, view, quants.layers, blocks * form->block_factors));
    };
    view.group_scales.factors = factors("scale_factors");
    if (form->has_mins) view.group_mins.factors = factors("min_factors");
  }
  if (check_.failed()) return view;
  const auto one_a_block = [](const GroupNumbers& each) {
    return each.numbers == nullptr || (each.type == Element::kF16 && each.group_blocks == 1);
  };
  view.kind = form->grouped;
  if (form->plain != form->grouped && one_a_block(view.group_scales) && one_a_block(view.group_mins)) {
    view.kind = form->plain;
    view.scales = static_cast<const uint16_t*>(view.group_scales.numbers);
    view.mins = static_cast<const uint16_t*>(view.group_mins.numbers);
  }
  return view;
}

WeightView PartReader::dense_weight() {
  WeightView view{};
  const MatrixPart values = matrix("weight", {ffi::DataType::F32, ffi::DataType::F16, ffi::DataType::BF16});
  if (check_.failed() || !check_.index("layer", picked_, values.layers)) return view;
  view.kind = values.dtype == ffi::DataType::F32   ? WeightKind::kF32
              : values.dtype == ffi::DataType::F16 ? WeightKind::kF16
                                                   : WeightKind::kBF16;
  view.out_features = values.rows;
  view.in_features = values.columns;
  view.values = values.data + picked_ * values.rows * values.columns * (view.kind == WeightKind::kF32 ? 4 : 2);
  return view;
}

// Quants [layers, out/16, in/2 * 16] and numbers [layers, out/16, in/32 * 16], see WeightTile.
WeightView PartReader::weight_tiles(WeightKind kind) {
  WeightView view{};
  view.kind = kind;
  const MatrixPart quants = matrix("weight", {kU8});
  if (check_.failed() || !check_.index("layer", picked_, quants.layers)) return view;
  const int64_t blocks = quants.columns / WeightTile::kBlockBytes;
  if (!check_.require(blocks > 0 && quants.columns % WeightTile::kBlockBytes == 0, "weight has ", quants.columns,
                      " bytes in sixteen rows, wanted a multiple of ", WeightTile::kBlockBytes)) {
    return view;
  }
  view.out_features = quants.rows * WeightTile::kRows;
  view.in_features = blocks * kQuantBlock;
  view.values = quants.data + picked_ * quants.rows * quants.columns;
  const auto numbers = [&](const char* name) -> const uint16_t* {
    if (check_.failed()) return nullptr;
    const MatrixPart part = matrix(name, {ffi::DataType::F16});
    if (check_.failed()) return nullptr;
    check_.require(part.layers == quants.layers && part.rows == quants.rows && part.columns == blocks * WeightTile::kRows,
                   name, " has ", part.layers, " x ", part.rows, " x ", part.columns, " numbers, wanted ", quants.layers,
                   " x ", quants.rows, " x ", blocks * WeightTile::kRows);
    return reinterpret_cast<const uint16_t*>(part.data) + picked_ * part.rows * part.columns;
  };
  view.scales = numbers("scales");
  if (kind == WeightKind::kQ4_1Tiles) view.mins = numbers("mins");
  return view;
}

PartReader::MatrixPart PartReader::matrix(const char* name, std::initializer_list<ffi::DataType> allowed) {
  const ffi::AnyBuffer buffer = array(name);
  MatrixPart part{1, 1, 1, buffer.element_type(), nullptr};
  if (check_.failed()) return part;
  const auto sizes = buffer.dimensions();
  const size_t last = sizes.size() - 1;
  if (!check_.require(sizes.size() == 2 || sizes.size() == 3, name, " has shape ", buffer,
                      ", wanted [out, in] or [layers, out, in]")) {
    return part;
  }
  if (std::find(allowed.begin(), allowed.end(), part.dtype) == allowed.end()) {
    std::string wanted;
    for (const ffi::DataType each : allowed) wanted += (wanted.empty() ? "" : " or ") + text(each);
    check_.require(false, name, " is ", part.dtype, ", wanted ", wanted);
  }
  return {last == 2 ? sizes[0] : 1, sizes[last - 1], sizes[last], part.dtype,
          static_cast<const char*>(buffer.untyped_data())};
}

void PartReader::require_beside(const char* name, const MatrixPart& part, const WeightView& view, int64_t layers,
                                bool fits, std::string_view wanted, int64_t number) {
  check_.require(part.layers == layers && part.rows == view.out_features && fits, name, " has ", part.layers, " x ",
                 part.rows, " x ", part.columns, " numbers for quants of ", layers, " x ", view.out_features, " x ",
                 view.in_features, ", wanted ", wanted, number, " a row");
}

GroupNumbers PartReader::group_numbers(const char* name, const WeightView& view, int64_t layers) {
  if (check_.failed()) return {};
  const MatrixPart part = matrix(name, {ffi::DataType::F16, ffi::DataType::F32});
  if (check_.failed()) return {};
  const int64_t blocks = view.in_features / kQuantBlock;
  const bool fits =
      view.in_features % kQuantBlock == 0 && blocks > 0 && part.columns > 0 && blocks % part.columns == 0;
  require_beside(name, part, view, layers, fits, "a divisor of ", blocks);
  if (check_.failed()) return {};
  const bool wide = part.dtype == ffi::DataType::F32;
  return {part.data + picked_ * part.rows * part.columns * (wide ? 4 : 2), wide ? Element::kF32 : Element::kF16,
          blocks / part.columns, nullptr};
}

const char* PartReader::block_bytes(const char* name, ffi::DataType dtype, const WeightView& view, int64_t layers,
                                    int64_t row_bytes) {
  if (check_.failed()) return nullptr;
  const MatrixPart part = matrix(name, {dtype});
  if (check_.failed()) return nullptr;
  require_beside(name, part, view, layers, part.columns == row_bytes, "", row_bytes);
  return part.data + picked_ * part.rows * part.columns;
}

}  // namespace jaxkv
