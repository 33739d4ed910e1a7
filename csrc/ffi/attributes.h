// The attributes of a call, by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ffi/buffers.h"
#include "ffi/kernel_kind.h"
#include "mlp/gated_ragged_dot.h"
#include "multiprocessors.h"
#include "types.h"

namespace jgg {

// Reads attributes, and keeps what is wrong with the first that is missing or of another type. XLA
// does not count attributes that are read so: a call may lack those that have a default.
class Attributes {
 public:
  explicit Attributes(ffi::Dictionary given) : given_(given) {}

  template <class T>
  T get(std::string_view name) {
    auto const value = given_.get<T>(name);
    if (value) return *value;
    fail("the attribute " + std::string(name) + ": " + value.error().message());
    return T{};
  }
  template <class T>
  T get(std::string_view name, T otherwise) {
    return has(name) ? get<T>(name) : otherwise;
  }
  bool has(std::string_view name) const { return given_.contains(name); }

  // A tile of the kind that the attribute `kind` names, or of `otherwise` in calls without it.
  TileConfig tile(KernelKind otherwise = KernelKind::kCooperative) {
    TileConfig tile{get<int32_t>("tile_m"), get<int32_t>("tile_n"), get<int32_t>("cluster"),
                    otherwise};
    if (!has("kind")) return tile;
    auto const name = get<std::string_view>("kind");
    if (!kernel_kind(name, tile.kind)) {
      fail("there is no kind of kernel called " + std::string(name));
    }
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

  ffi::Error const& error() const { return error_; }

 private:
  void fail(std::string const& message) {
    if (!error_.failure()) error_ = invalid(message);
  }

  ffi::Dictionary given_;
  ffi::Error error_ = ffi::Error::Success();
};

}  // namespace jgg
