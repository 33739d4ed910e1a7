// Buffers that are views of a larger buffer.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/call.h"

namespace jgg {

// An array of shape `dimensions` whose elements are those of a flat array from `first` on. A view
// avoids a copy, because XLA copies a slice of an array before it passes the slice to a custom
// call.
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

  // Returns whether the buffer is flat and the view lies inside it.
  bool fits() const { return fits_; }
  ffi::AnyBuffer operator*() { return ffi::AnyBuffer(&buffer_); }

 private:
  std::vector<int64_t> dimensions_;
  bool fits_;
  XLA_FFI_Buffer buffer_;
};

// Replaces a flat `operand` by a view of it if the call has the attribute `slice`. The attribute's
// int64s are the view's first element and its shape. `view` owns the view.
inline void use_view(Call& call, ffi::AnyBuffer& operand, std::optional<BufferView>& view) {
  if (!call.has("slice")) return;
  auto const place = call.get<ffi::Span<int64_t const>>("slice");
  if (place.size() < 2) return call.fail("slice has to be int64s: a first element, a shape");
  view.emplace(operand, place[0], std::vector<int64_t>(place.begin() + 1, place.end()));
  if (!view->fits()) return call.fail("the slice is not inside a flat array");
  operand = **view;
}

}  // namespace jgg
