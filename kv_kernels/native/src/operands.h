// Operands of an FFI call, checked: every handler reads its buffers through this, so that a wrong one is an error with
// the numbers and never a read out of bounds.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {

namespace ffi = xla::ffi;

constexpr int64_t kAny = -1;

// What a part of a complaint reads like.
inline std::string text(std::string_view part) { return std::string(part); }
inline std::string text(int64_t number) { return std::to_string(number); }
std::string text(const ffi::AnyBuffer& buffer);
std::string text(ffi::DataType dtype);

// Collects the first complaint of a call.
class Checker {
 public:
  explicit Checker(const char* operation) : operation_(operation) {}

  // The buffer has these sizes; kAny matches any.
  bool shape(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> sizes);
  bool dtype(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType wanted);
  // The buffer is float32, float16 or bfloat16; its element type goes to `element`.
  bool floating(const char* name, const ffi::AnyBuffer& buffer, Element* element);
  // 0 <= value < limit.
  bool index(const char* name, int64_t value, int64_t limit);
  // The complaint is put together from `parts` (text, numbers, dtypes, and arrays for their shapes) where it is one.
  template <class... Parts>
  bool require(bool condition, const Parts&... parts) {
    if (!condition && !failed_) {
      failed_ = true;
      message_ = std::string("jaxkv ") + operation_ + ": ";
      (message_.append(text(parts)), ...);
    }
    return condition;
  }

  bool failed() const { return failed_; }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }

 private:
  const char* operation_;
  std::string message_;
  bool failed_ = false;
};


// The arrays that follow a call's fixed operands, taken one after the other; `layer` (i32 []) picks from those that have
// an axis of layers in front. After a complaint nothing that it gave may be used.
class PartReader {
 public:
  PartReader(Checker& check, const ffi::AnyBuffer& layer, const ffi::RemainingArgs& parts);

  ffi::AnyBuffer array(const char* name);
  // f32 [size] or [layers, size].
  const float* vector(const char* name, int64_t size);
  // A matrix [out, in]: one array where dense; quants, scales and whatever else the kind has where not.
  WeightView weight(std::string_view kind);
  void require_all_read();

 private:
  // An array [layers, rows, columns] or [rows, columns].
  struct MatrixPart {
    int64_t layers, rows, columns;
    ffi::DataType dtype;
    const char* data;
  };

  WeightView dense_weight();
  WeightView weight_tiles(WeightKind kind);
  MatrixPart matrix(const char* name, std::initializer_list<ffi::DataType> allowed);
  // Of the quantized weight `view`, whose quants have so many layers.
  GroupNumbers group_numbers(const char* name, const WeightView& view, int64_t layers);
  const char* block_bytes(const char* name, ffi::DataType dtype, const WeightView& view, int64_t layers,
                          int64_t row_bytes);
  void require_beside(const char* name, const MatrixPart& part, const WeightView& view, int64_t layers, bool fits,
                      std::string_view wanted, int64_t number);

  Checker& check_;
  const ffi::AnyBuffer& layer_;
  const ffi::RemainingArgs& parts_;
  int64_t picked_ = 0;
  size_t next_ = 0;
};

}  // namespace jaxkv
