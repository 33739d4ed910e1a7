// Selects the compiled kernel of an expert MLP by the run-time arguments, and launches it.
#pragma once

#include "mlp/gated.h"
#include "mlp/gradient.h"
#include "mlp/paired.h"
#include "ragged/launch.h"
#include "ragged/tiles.h"
#include "sm90/consumer_fused.h"

namespace jgg::mlp {

template <class Problem, template <class, class> class Roles, class Arguments>
cudaError_t launch(Arguments const& arguments, cudaStream_t stream) {
  return sm90::launch<Roles<Problem, sm90::DefaultMainloop<Problem>>>(arguments, stream);
}

// Consumers take tiles alternately, because the epilogue takes as long as the product.
using GradientTiles =
    TileTable<Tile<128, 192, 2, KernelKind::kPingpong>, Tile<128, 128, 2, KernelKind::kPingpong>>;

// lhs [m, k] and rhs [g, n, k] are contiguous along K. rhs [g, k, n] is contiguous along N.
template <ElementType kType, Major kRhsMajor, class Tiles = TileTable<sm90::WideTile>,
          class Function>
cudaError_t with_config(TileConfig config, Function function) {
  return with_constants(
      [&](auto tile) {
        using Element = sm90::Typed<kType>;
        return function(sm90::ConfigOf<decltype(tile), Element, Element, Major::kK, kRhsMajor>{});
      },
      OneTileOf<Tiles>{config});
}

// How rows of x that lie anywhere in memory are loaded (sm90/gather.h).
enum class Gather : int { kNone, kShared, kOwn };

template <ElementType kType>
cudaError_t gated(TileConfig tile, GatedArguments const& a, cudaStream_t stream) {
  bool const is_plain = a.has_up() && a.activation.function == Function::kSigmoid &&
                        !a.gate_bias.data && !a.up_bias.data;
  if (!is_plain) return activated_ragged_dot(tile, a, stream);
  // If a group's rows have two tiles of columns, a cluster takes both and shares their rows. With
  // one tile, no other tile reads its rows. With more tiles, clusters share weights instead of
  // rows. Clusters also share weights if at least half of the second tile is empty, which is 12 %
  // faster.
  constexpr int kColumns = sm90::WideTile::kTileN / 2;
  bool const shares_rows = a.n > kColumns + kColumns / 2 && a.n <= 2 * kColumns;
  auto const how = a.rows == nullptr ? Gather::kNone : shares_rows ? Gather::kShared : Gather::kOwn;
  return OneOf<Gather::kNone, Gather::kShared, Gather::kOwn>{how}([&](auto gathers) {
    return with_config<kType, Major::kMN>(tile, [&](auto config) {
      using Product = GatedProduct<decltype(config), /*kHasUp=*/true, /*kIsGeneral=*/false,
                                   gathers.value != Gather::kNone, gathers.value == Gather::kOwn>;
      return launch<Product, sm90::FusedRoles>(a, stream);
    });
  });
}

// Launches the kernel for biases, for activations other than kSigmoid, and for experts without up.
template <ElementType kType>
cudaError_t activated(TileConfig tile, GatedArguments const& a, cudaStream_t stream) {
  return with_config<kType, Major::kMN>(tile, [&](auto config) {
    return with_constants(
        [&](auto has_up) {
          using Product = GatedProduct<decltype(config), has_up.value, /*kIsGeneral=*/true>;
          return launch<Product, sm90::FusedRoles>(a, stream);
        },
        Flag{a.has_up()});
  });
}

template <ElementType kType>
cudaError_t gradient(TileConfig tile, GradientArguments const& arguments, cudaStream_t stream) {
  Form const form = form_of(arguments.activation, arguments.up != nullptr);
  if (arguments.rows != nullptr) {
    if (form != Form::kPlain) return kNotCompiled;
    return with_config<kType, Major::kK, GradientTiles>(tile, [&](auto config) {
      using Problem = GatedGradient<decltype(config), Form::kPlain, /*kGathers=*/true>;
      return launch<Problem, sm90::FusedRoles>(arguments, stream);
    });
  }
  using Forms = OneOf<Form::kPlain, Form::kGated, Form::kGeneral, Form::kUngated>;
  return Forms{form}([&](auto form) {
    return with_config<kType, Major::kK, GradientTiles>(tile, [&](auto config) {
      using Problem = GatedGradient<decltype(config), form.value>;
      return launch<Problem, sm90::FusedRoles>(arguments, stream);
    });
  });
}

template <ElementType kType>
cudaError_t paired(TileConfig tile, PairedArguments const& arguments, cudaStream_t stream) {
  return with_config<kType, Major::kK>(tile, [&](auto config) {
    return launch<PairedProduct<decltype(config)>, sm90::WholeTileRoles>(arguments, stream);
  });
}

}  // namespace jgg::mlp
