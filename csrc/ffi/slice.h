// Buffers that are a slice of a larger one.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/optional_attribute.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// An array of `dimensions` whose elements are those of a flat one from `first` on. XLA hands a
// slice of an array to a custom call as a copy.
class BufferSlice {
 public:
  BufferSlice(xla::ffi::AnyBuffer const& flat, int64_t first, std::vector<int64_t> dimensions)
      : dimensions_(std::move(dimensions)), fits_(flat.dimensions().size() == 1 && first >= 0) {
    // What is left of the flat array for one element of each dimension, so that nothing overflows.
    int64_t left = fits_ ? flat.dimensions()[0] - first : 0;
    for (int64_t const size : dimensions_) {
      fits_ = fits_ && size >= 1 && size <= left;
      if (fits_) left /= size;
    }
    int64_t const offset =
        fits_ ? first * static_cast<int64_t>(xla::ffi::ByteWidth(flat.element_type())) : 0;
    buffer_ = {XLA_FFI_Buffer_STRUCT_SIZE,
               nullptr,
               static_cast<XLA_FFI_DataType>(flat.element_type()),
               static_cast<char*>(flat.untyped_data()) + offset,
               static_cast<int64_t>(dimensions_.size()),
               dimensions_.data()};
  }
  BufferSlice(BufferSlice const&) = delete;

  // Whether all of it lies inside a flat array.
  bool fits() const { return fits_; }
  XLA_FFI_Buffer* buffer() { return &buffer_; }
  xla::ffi::AnyBuffer operator*() { return xla::ffi::AnyBuffer(&buffer_); }

 private:
  std::vector<int64_t> dimensions_;
  bool fits_;
  XLA_FFI_Buffer buffer_;
};

// `kHandler` with one more attribute that a call may have, the int64s `slice`: operand `kOperand`
// is then a flat array, of which the handler gets the slice from the element on that the first of
// these is, of the shape that the others are.
template <XLA_FFI_Handler* kHandler, int kOperand>
XLA_FFI_Error* of_slice(XLA_FFI_CallFrame* frame) {
  constexpr char const* kName = "slice";
  xla::ffi::Dictionary const given(&frame->attrs);
  if (!given.contains(kName)) return kHandler(frame);
  auto const place = given.get<xla::ffi::Span<int64_t const>>(kName);
  if (!place || place->size() < 2 || frame->args.size <= kOperand) {
    return invalid_call(*frame, "slice has to be int64s, a first element and a shape");
  }
  std::vector<void*> operands(frame->args.args, frame->args.args + frame->args.size);
  xla::ffi::AnyBuffer const flat(static_cast<XLA_FFI_Buffer*>(operands[kOperand]));
  BufferSlice slice(flat, (*place)[0], {place->begin() + 1, place->end()});
  if (!slice.fits()) return invalid_call(*frame, "the slice is not inside a flat array");

  WithoutAttribute others(*frame, kName);
  operands[kOperand] = slice.buffer();
  others.frame().args.args = operands.data();
  XLA_FFI_Error* const error = kHandler(&others.frame());
  frame->future = others.frame().future;
  return error;
}

}  // namespace jgg
