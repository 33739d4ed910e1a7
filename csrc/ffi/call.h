// A call of a handler: its attributes by name, and checks of its operands and results.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "dispatch.h"
#include "ffi/element_types.h"
#include "largest_sizes.h"
#include "mlp/gated_ragged_dot.h"
#include "multiprocessors.h"
#include "types.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

namespace ffi = ::xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kVectorBytes = 16;

inline ffi::Error invalid(std::string const& message) {
  return ffi::Error::InvalidArgument(message);
}

inline ffi::Error launched(cudaError_t status, char const* product) {
  if (status == cudaSuccess) return ffi::Error::Success();
  if (status == kNotCompiled) {
    return invalid(std::string(product) +
                   ": no kernel is compiled for this tile, kind, element types and majors");
  }
  return ffi::Error::Internal(std::string(product) + ": " + cudaGetErrorString(status));
}

// The dimensions of a buffer, without the batch dimension that may come first.
template <int kRank>
struct Shape {
  char const* name = "";
  std::array<int, kRank> size{};
  int batches = 0;
  bool batched = false;
};

constexpr std::pair<std::string_view, KernelKind> kKernelKinds[] = {
    {"cooperative", KernelKind::kCooperative},
    {"pingpong", KernelKind::kPingpong},
    {"stream_k", KernelKind::kStreamK},
    {"swapped", KernelKind::kSwapped},
    {"fine", KernelKind::kFine},
};

// Reads attributes and buffers, and keeps the first error. A wrong attribute or buffer reads as
// zero, so that a handler needs to look at the error only once, before it launches a kernel.
class Call {
 public:
  explicit Call(ffi::Dictionary attributes) : attributes_(attributes) {}

  bool failed() const { return error_.failure(); }
  ffi::Error const& error() const { return error_; }

  void fail(std::string const& message) {
    if (!failed()) error_ = invalid(message);
  }

  // ---- attributes. XLA does not count them, so a call may leave out those with a default ----

  template <class T>
  T get(std::string_view name) {
    auto const value = attributes_.get<T>(name);
    if (value) return *value;
    fail("the attribute " + std::string(name) + ": " + value.error().message());
    return T{};
  }
  template <class T>
  T get(std::string_view name, T otherwise) {
    return has(name) ? get<T>(name) : otherwise;
  }
  bool has(std::string_view name) const { return attributes_.contains(name); }

  // Returns the tile. The attribute `kind` gives the kind of kernel; calls without this attribute
  // have the kind `otherwise`.
  TileConfig tile(KernelKind otherwise = KernelKind::kCooperative) {
    TileConfig tile{get<int32_t>("tile_m"), get<int32_t>("tile_n"), get<int32_t>("cluster"),
                    otherwise};
    if (!has("kind")) return tile;
    auto const name = get<std::string_view>("kind");
    for (auto const& [known, kind] : kKernelKinds) {
      if (known != name) continue;
      tile.kind = kind;
      return tile;
    }
    fail("there is no kind of kernel called " + std::string(name));
    return tile;
  }

  // Returns the activation. The caller gives its function.
  mlp::Activation activation(mlp::Function function = mlp::Function::kSigmoid) {
    return {get<float>("alpha"), get<float>("cubic"), get<float>("limit"), get<float>("shift"),
            function};
  }

  // Returns the number of pairs of each token. Pair i belongs to token i / divisor.
  int divisor() {
    int const divisor = get<int32_t>("divisor");
    if (divisor < 1) fail("divisor has to be positive, got " + std::to_string(divisor));
    return divisor;
  }

  // Returns the largest number of multiprocessors that the call's kernels use. The other
  // multiprocessors stay free for kernels that run at the same time.
  int max_sms() {
    int const most = get<int32_t>("max_sms", kMostMultiprocessors);
    if (most < 1) fail("max_sms has to be positive, got " + std::to_string(most));
    return most;
  }

  // ---- buffers ----

  // Returns the element type of a buffer. Fails with the message `otherwise` unless it is one of
  // `among`.
  ElementType type(ffi::AnyBuffer const& buffer, std::initializer_list<ElementType> among,
                   char const* otherwise) {
    ElementType type{};
    if (!element_type(buffer.element_type(), among, type)) fail(otherwise);
    return type;
  }
  ElementType quantized_type(ffi::AnyBuffer const& values) {
    return type(values, kFloat8s, "the quantisers return f8e4m3fn or f8e5m2");
  }

  // Returns whether kernels support this size, from 1 to kMostSize. `name` is for the error.
  bool expect_size(std::string const& name, int64_t size) {
    if (size >= 1 && size <= kMostSize) return true;
    fail(name + " is " + std::to_string(size) + ", but has to be from 1 to " +
         std::to_string(kMostSize));
    return false;
  }

  // Returns the dimensions of a buffer, which may have a batch dimension first.
  template <int kRank, class Buffer>
  Shape<kRank> shape(char const* name, Buffer const& buffer) {
    auto const dimensions = buffer.dimensions();
    bool const batched = dimensions.size() == kRank + 1;
    if (!batched && dimensions.size() != kRank) {
      fail(std::string(name) + " has rank " + std::to_string(dimensions.size()) + ", not " +
           std::to_string(kRank) + ", or one more with a batch dimension");
      return {};
    }
    for (int64_t const size : dimensions) {
      if (!expect_size(std::string("a dimension of ") + name, size)) return {};
    }
    Shape<kRank> shape{name, {}, batched ? static_cast<int>(dimensions[0]) : 1, batched};
    for (int i = 0; i < kRank; ++i) shape.size[i] = static_cast<int>(dimensions[batched + i]);
    return shape;
  }

  // Fails unless the buffer has the expected size and either all batches or, if batches share the
  // buffer, no batch dimension.
  template <class Shape>
  void expect(Shape const& shape, decltype(Shape::size) expected, int batches) {
    if (shape.size == expected && (!shape.batched || shape.batches == batches)) return;
    std::string message = std::string(shape.name) + " does not fit the other operands: expected [";
    for (int const size : expected) message += std::to_string(size) + ", ";
    fail(message.replace(message.size() - 2, 2, "]"));
  }

  // Returns the dimensions of a buffer that must not have a batch dimension.
  template <int kRank, class Buffer>
  std::array<int, kRank> size(char const* name, Buffer const& buffer) {
    auto const found = shape<kRank>(name, buffer);
    if (found.batched) fail(std::string(name) + " has a batch dimension");
    return found.size;
  }
  template <size_t kRank, class Buffer>
  void expect(char const* name, Buffer const& buffer, std::array<int, kRank> expected) {
    auto const found = shape<static_cast<int>(kRank)>(name, buffer);
    if (found.batched) fail(std::string(name) + " has a batch dimension");
    expect(found, expected, 1);
  }

  // Fails unless rows are whole vectors of `bytes`, which TMA and wide loads need.
  void expect_vectors(char const* name, ffi::AnyBuffer const& buffer,
                      int64_t bytes = kVectorBytes) {
    auto const dimensions = buffer.dimensions();
    if (dimensions.size() == 0) return fail(std::string(name) + " has no rows");
    int64_t const columns = dimensions.back();
    auto const row = columns * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
    if (row % bytes == 0) return;
    fail(std::string(name) + " has rows of " + std::to_string(columns) +
         " elements, which are not a multiple of " + std::to_string(bytes) + " bytes");
  }
  // Like expect_vectors(). If the operand is float32, the rows of its 16-bit parts have to be whole
  // vectors too.
  void expect_operand_vectors(char const* name, ffi::AnyBuffer const& buffer) {
    bool const in_parts = buffer.element_type() == ffi::F32;
    expect_vectors(name, buffer, in_parts ? 2 * kVectorBytes : kVectorBytes);
  }

 private:
  ffi::Dictionary attributes_;
  ffi::Error error_ = ffi::Error::Success();
};

}  // namespace jgg
