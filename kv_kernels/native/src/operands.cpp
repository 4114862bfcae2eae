#include "operands.h"

#include <array>

namespace jaxkv {

const char* dtype_name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32: return "float32";
    case ffi::DataType::F16: return "float16";
    case ffi::DataType::BF16: return "bfloat16";
    case ffi::DataType::F64: return "float64";
    case ffi::DataType::S8: return "int8";
    case ffi::DataType::U8: return "uint8";
    case ffi::DataType::S32: return "int32";
    case ffi::DataType::S64: return "int64";
    default: return "another dtype";
  }
}

std::string shape_text(const ffi::AnyBuffer& buffer) {
  std::string text = "[";
  for (const int64_t size : buffer.dimensions()) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

bool Checker::require(bool condition, const std::string& message) {
  if (!condition && !failed_) {
    failed_ = true;
    message_ = std::string("jaxkv ") + operation_ + ": " + message;
  }
  return condition;
}

bool Checker::shape(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> sizes) {
  const auto actual = buffer.dimensions();
  bool same = actual.size() == sizes.size();
  std::string wanted;
  size_t axis = 0;
  for (const int64_t size : sizes) {
    if (same && size != kAny && actual[axis] != size) same = false;
    ++axis;
    wanted += (wanted.empty() ? "" : ", ") + (size == kAny ? std::string("any") : std::to_string(size));
    if (actual.size() != sizes.size()) same = false;
  }
  return require(same, std::string(name) + " has shape " + shape_text(buffer) + ", wanted [" + wanted + "]");
}

bool Checker::dtype(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType wanted) {
  const ffi::DataType actual = buffer.element_type();
  return require(actual == wanted,
                 std::string(name) + " is " + dtype_name(actual) + ", wanted " + dtype_name(wanted));
}

bool Checker::floating(const char* name, const ffi::AnyBuffer& buffer, Element* element) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: *element = Element::kF32; return true;
    case ffi::DataType::F16: *element = Element::kF16; return true;
    case ffi::DataType::BF16: *element = Element::kBF16; return true;
    default:
      return require(false, std::string(name) + " is " + dtype_name(buffer.element_type()) +
                                ", wanted float32, float16 or bfloat16");
  }
}

bool Checker::index(const char* name, int64_t value, int64_t limit) {
  return require(value >= 0 && value < limit, std::string(name) + " " + std::to_string(value) + " is outside 0 to " +
                                                  std::to_string(limit - 1));
}

namespace {

struct MatrixPart {
  int64_t layers, rows, columns;
  const char* data;
};

// A buffer [layers, rows, columns] or [rows, columns].
MatrixPart matrix_part(Checker& check, const char* name, const ffi::AnyBuffer& buffer) {
  const auto sizes = buffer.dimensions();
  if (!check.require(sizes.size() == 2 || sizes.size() == 3,
                     std::string(name) + " has shape " + shape_text(buffer) + ", wanted [out, in] or [layers, out, in]")) {
    return {1, 1, 1, nullptr};
  }
  const size_t last = sizes.size() - 1;
  return {last == 2 ? sizes[0] : 1, sizes[last - 1], sizes[last], static_cast<const char*>(buffer.untyped_data())};
}

}  // namespace

PartReader::PartReader(Checker& check, const ffi::AnyBuffer& layer, const ffi::RemainingArgs& parts)
    : check_(check), layer_(layer), parts_(parts) {
  if (check.shape("layer", layer, {}) && check.dtype("layer", layer, ffi::DataType::S32))
    picked_ = *static_cast<const int32_t*>(layer.untyped_data());
}

ffi::AnyBuffer PartReader::array(const char* name) {
  const auto part = next_ < parts_.size() ? parts_.get<ffi::AnyBuffer>(next_) : ffi::Unexpected(ffi::Error::Internal(""));
  check_.require(part.has_value(), std::string(name) + " is missing, or is not an array: " +
                                       std::to_string(parts_.size()) + " parts are given");
  ++next_;
  return part.has_value() ? *part : layer_;
}

const float* PartReader::vector(const char* name, int64_t size) {
  const ffi::AnyBuffer part = array(name);
  if (check_.failed()) return nullptr;
  const auto sizes = part.dimensions();
  if (!check_.require(sizes.size() == 1 || sizes.size() == 2,
                      std::string(name) + " has shape " + shape_text(part) + ", wanted [size] or [layers, size]") ||
      !check_.require(sizes[sizes.size() - 1] == size, std::string(name) + " has shape " + shape_text(part) +
                                                           ", wanted " + std::to_string(size) + " numbers a layer") ||
      !check_.dtype(name, part, ffi::DataType::F32)) {
    return nullptr;
  }
  const auto* data = static_cast<const float*>(part.untyped_data());
  if (sizes.size() == 1) return data;
  return check_.index("layer", picked_, sizes[0]) ? data + picked_ * size : nullptr;
}

void PartReader::require_all_read() {
  check_.require(next_ == parts_.size(), std::to_string(parts_.size()) + " parts are given, " + std::to_string(next_) +
                                             " are called for");
}

WeightView PartReader::weight(std::string_view kind) {
  WeightView view{};
  const bool dense = kind == "dense", has_mins = kind == "q4_1";
  if (check_.failed() || !check_.require(dense || has_mins || kind == "q4_0" || kind == "q8_0",
                                         "weight kind " + std::string(kind) + " is not dense, q8_0, q4_0 or q4_1")) {
    return view;
  }
  constexpr std::array<const char*, 3> names{"weight", "scales", "mins"};
  std::array<MatrixPart, 3> found{};
  const size_t wanted_parts = dense ? 1 : has_mins ? 3 : 2;
  for (size_t i = 0; i < wanted_parts; ++i) {
    const ffi::AnyBuffer part = array(names[i]);
    if (check_.failed()) return view;
    found[i] = matrix_part(check_, names[i], part);
    if (check_.failed()) return view;
    if (dense) {
      Element element;
      if (!check_.floating(names[i], part, &element)) return view;
      view.kind = element == Element::kF32   ? WeightKind::kF32
                  : element == Element::kF16 ? WeightKind::kF16
                                             : WeightKind::kBF16;
    } else if (!check_.dtype(names[i], part, i > 0 ? ffi::DataType::F16 : kind == "q8_0" ? ffi::DataType::S8
                                                                                         : ffi::DataType::U8)) {
      return view;
    }
  }
  const MatrixPart& values = found[0];
  if (!check_.index("layer", picked_, values.layers)) return view;
  view.out_features = values.rows;
  if (dense) {
    view.in_features = values.columns;
    view.values = values.data + picked_ * values.rows * values.columns * (view.kind == WeightKind::kF32 ? 4 : 2);
    return view;
  }
  view.kind = kind == "q8_0" ? WeightKind::kQ8_0 : has_mins ? WeightKind::kQ4_1 : WeightKind::kQ4_0;
  view.in_features = kind == "q8_0" ? values.columns : 2 * values.columns;
  for (size_t i = 1; i < wanted_parts; ++i) {
    const MatrixPart& part = found[i];
    if (!check_.require(part.layers == values.layers && part.rows == values.rows &&
                            part.columns * kQuantBlock == view.in_features,
                        std::string(names[i]) + " has " + std::to_string(part.layers) + " x " +
                            std::to_string(part.rows) + " x " + std::to_string(part.columns) +
                            " numbers for quants of " + std::to_string(values.layers) + " x " +
                            std::to_string(values.rows) + " x " + std::to_string(view.in_features) +
                            ", wanted one per 32")) {
      return view;
    }
  }
  const int64_t blocks = values.rows * view.in_features / kQuantBlock;
  view.values = values.data + picked_ * values.rows * values.columns;
  view.scales = reinterpret_cast<const uint16_t*>(found[1].data) + picked_ * blocks;
  if (has_mins) view.mins = reinterpret_cast<const uint16_t*>(found[2].data) + picked_ * blocks;
  return view;
}

}  // namespace jaxkv
