// Translates run-time arguments to template arguments of a compiled kernel, and defines the tables
// of tiles that kernels are compiled for. This header does not include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>
#include <vector>

#include "types.h"

namespace jgg {

// The status if no kernel is compiled for the arguments. CUDA never returns this status for a
// launch.
constexpr cudaError_t kNotCompiled = cudaErrorSymbolNotFound;

template <int kTileM_, int kTileN_, int kCluster_, KernelKind kKind_ = KernelKind::kCooperative>
struct Tile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kCluster = kCluster_;
  static constexpr KernelKind kKind = kKind_;
  static constexpr TileConfig kConfig{kTileM, kTileN, kCluster, kKind};
};

template <class... Tiles>
struct TileTable {};

template <class... Tiles>
std::vector<TileConfig> list(TileTable<Tiles...>) {
  return {Tiles::kConfig...};
}

// Calls `function` with the entry of the table that equals `config`. Returns kNotCompiled if there
// is no such entry.
template <class... Tiles, class Function>
cudaError_t with_tile(TileTable<Tiles...>, TileConfig config, Function function) {
  cudaError_t status = kNotCompiled;
  auto const matches = [&](auto tile) {
    if (!(config == decltype(tile)::kConfig)) return false;
    status = function(tile);
    return true;
  };
  (matches(Tiles{}) || ...);
  return status;
}

// A run-time value that is one of `kValues`. Calls a function with the value as a compile-time
// constant, or returns kNotCompiled if the value is not among `kValues`.
template <auto... kValues>
struct OneOf {
  std::common_type_t<decltype(kValues)...> value;

  template <class Function>
  cudaError_t operator()(Function&& function) const {
    cudaError_t status = kNotCompiled;
    auto const matches = [&](auto constant) {
      if (value != constant.value) return false;
      status = function(constant);
      return true;
    };
    (void)(matches(std::integral_constant<decltype(kValues), kValues>{}) || ...);
    return status;
  }
};

using Flag = OneOf<false, true>;

// Like `OneOf`, for a tile of a table: calls a function with an object of the tile's type.
template <class Table>
struct OneTileOf {
  TileConfig config;

  template <class Function>
  cudaError_t operator()(Function&& function) const {
    return with_tile(Table{}, config, function);
  }
};

// Calls `function` with a constant for each choice, in the order of the choices. Returns
// kNotCompiled if the run-time value of a choice is not one of its compile-time values.
template <class Function>
cudaError_t with_constants(Function&& function) {
  return function();
}
template <class Function, class Choice, class... Choices>
cudaError_t with_constants(Function&& function, Choice choice, Choices... choices) {
  return choice([&](auto constant) {
    return with_constants([&](auto... constants) { return function(constant, constants...); },
                          choices...);
  });
}

}  // namespace jgg
