// Buffers that are views of a larger one.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/call.h"

namespace jgg {

// An array of `dimensions` whose elements are those of a flat one from `first` on. XLA hands a part
// of an array to a custom call as a copy.
class BufferView {
 public:
  BufferView(ffi::AnyBuffer const& flat, int64_t first, std::vector<int64_t> dimensions)
      : dimensions_(std::move(dimensions)), fits_(flat.dimensions().size() == 1 && first >= 0) {
    // `left` is the size of the flat array divided by the dimensions so far, so that nothing
    // overflows.
    int64_t left = fits_ ? flat.dimensions()[0] - first : 0;
    for (int64_t const size : dimensions_) {
      fits_ = fits_ && size >= 1 && size <= left;
      if (fits_) left /= size;
    }
    int64_t const offset =
        fits_ ? first * static_cast<int64_t>(ffi::ByteWidth(flat.element_type())) : 0;
    buffer_ = {XLA_FFI_Buffer_STRUCT_SIZE,
               nullptr,
               static_cast<XLA_FFI_DataType>(flat.element_type()),
               static_cast<char*>(flat.untyped_data()) + offset,
               static_cast<int64_t>(dimensions_.size()),
               dimensions_.data()};
  }
  BufferView(BufferView const&) = delete;

  // Whether all of it lies inside a flat array.
  bool fits() const { return fits_; }
  ffi::AnyBuffer operator*() { return ffi::AnyBuffer(&buffer_); }

 private:
  std::vector<int64_t> dimensions_;
  bool fits_;
  XLA_FFI_Buffer buffer_;
};

// Replaces a flat `operand` by a view of it, which lies in `view`, if the call has the attribute
// `slice`: int64s, the view's first element and its shape.
inline void use_view(Call& call, ffi::AnyBuffer& operand, std::optional<BufferView>& view) {
  if (!call.has("slice")) return;
  auto const place = call.get<ffi::Span<int64_t const>>("slice");
  if (place.size() < 2) return call.fail("slice has to be int64s, a first element and a shape");
  view.emplace(operand, place[0], std::vector<int64_t>(place.begin() + 1, place.end()));
  if (!view->fits()) return call.fail("the view is not inside a flat array");
  operand = **view;
}

}  // namespace jgg
