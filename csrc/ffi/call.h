// A call of a handler: its attributes by name, and checks of its operands and results.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "mlp/gated_ragged_dot.h"
#include "multiprocessors.h"
#include "types.h"

namespace jgg {

constexpr std::pair<std::string_view, KernelKind> kKernelKinds[] = {
    {"cooperative", KernelKind::kCooperative},
    {"pingpong", KernelKind::kPingpong},
    {"stream_k", KernelKind::kStreamK},
    {"swapped", KernelKind::kSwapped},
    {"fine", KernelKind::kFine},
};

// Keeps what is wrong with the first attribute or buffer that is not as it should be. Whatever is
// asked for is zero where it is wrong, so that a handler may look at the error once, before it
// launches a kernel.
class Call {
 public:
  explicit Call(ffi::Dictionary attributes) : attributes_(attributes) {}

  bool failed() const { return error_.failure(); }
  ffi::Error const& error() const { return error_; }

  // Takes over what is wrong, if anything is.
  void check(ffi::Error const& error) {
    if (!failed()) error_ = error;
  }
  void fail(std::string const& message) { check(invalid(message)); }

  // ---- attributes. XLA does not count them: a call may lack those that have a default ----

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

  // A tile of the kind that the attribute `kind` names, or of `otherwise` in calls without it.
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

  // The activation, of the function that the caller knows.
  mlp::Activation activation(mlp::Function function = mlp::Function::kSigmoid) {
    return {get<float>("alpha"), get<float>("cubic"), get<float>("limit"), get<float>("shift"),
            function};
  }

  // The most multiprocessors that the call's kernels use; the rest is free for kernels that run at
  // the same time.
  int max_sms() {
    int const most = get<int32_t>("max_sms", kMostMultiprocessors);
    if (most < 1) fail("max_sms has to be positive, got " + std::to_string(most));
    return most;
  }

  // ---- buffers ----

  template <class T>
  T take(ffi::ErrorOr<T> const& value) {
    if (value) return *value;
    check(value.error());
    return T{};
  }

  // The element type of a buffer, one of `among`.
  ElementType type(ffi::AnyBuffer const& buffer, std::initializer_list<ElementType> among,
                   char const* otherwise) {
    ElementType type{};
    if (!element_type(buffer.element_type(), among, type)) fail(otherwise);
    return type;
  }
  ElementType quantized_type(ffi::AnyBuffer const& values) {
    return type(values, kFloat8s, "the quantisers return f8e4m3fn or f8e5m2");
  }

  // The dimensions of a buffer, which may have a batch dimension before them.
  template <int kRank, class Buffer>
  Shape<kRank> shape(char const* name, Buffer const& buffer) {
    return take(Shape<kRank>::of(name, buffer));
  }
  // Operands either share the batch or have all of it.
  template <class Shape>
  void expect(Shape const& shape, decltype(Shape::size) expected, int batches) {
    check(shape.expect(expected, batches));
  }

  // The dimensions of a buffer without a batch dimension.
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
    check(found.expect(expected, 1));
  }

 private:
  ffi::Dictionary attributes_;
  ffi::Error error_ = ffi::Error::Success();
};

}  // namespace jgg
