// Translates run-time arguments to the constants of one compiled kernel, and holds the tables of
// tiles that kernels are compiled for. No CUTLASS here.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>
#include <vector>

#include "types.h"

namespace jgg {

// The status of a call for which no kernel is compiled: none that a launch returns.
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

// Picks the entry of the table that `config` names and hands it to `function`.
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

// A choice among constants: hands the one that `value` is to a function.
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

// A choice among the tiles of a table, which are types.
template <class Table>
struct OneTileOf {
  TileConfig config;

  template <class Function>
  cudaError_t operator()(Function&& function) const {
    return with_tile(Table{}, config, function);
  }
};

// Calls `function` with a constant for each choice, in their order. kNotCompiled
// if a choice does not have its value.
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
