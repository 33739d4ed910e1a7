// The order in which the output tiles of one group are computed, and which of them are computed
// together by the two CTAs of a cluster.
#pragma once

#include "scheduler/host_device.h"

namespace jgg {

// The operand tile that the CTAs of a cluster share. Each CTA loads half of it and multicasts this
// half to both. If the CTAs share both operands, each CTA loads one of them.
enum class Share : int { kNothing = 0, kLhs = 1, kRhs = 2, kBoth = 3 };

struct TileCoordinate {
  int m;  // in tiles
  int n;
  Share share;
};

// A grid of m_tiles x n_tiles output tiles. A cluster of two CTAs takes two tiles that are
// neighbours along M and share the rhs tile; where m_tiles is odd, the last row of tiles is paired
// along N instead and shares the lhs tile. No unit of work lies wholly outside the grid. If both
// counts are odd, one unit has a second tile past the last column.
//
// If kSharesLhs is true, all tiles are paired along N, and if n_tiles is odd, the last unit of each
// row has a second tile past the last column.
//
// Units are walked in bands of up to kBand along M, each band column by column. While a band is
// swept, its lhs rows stay in L2 and every rhs column is read once, so the units in flight cause as
// much traffic as a roughly square patch of the output.
template <int kCluster, bool kSharesLhs = false>
class Raster {
  static_assert(kCluster == 1 || kCluster == 2, "clusters of one or two CTAs");

 public:
  static constexpr int kRowsAUnit = kSharesLhs ? 1 : kCluster;
  static constexpr int kBand = 16 / kRowsAUnit;

  Raster() = default;
  JGG_HOST_DEVICE Raster(int m_tiles, int n_tiles)
      : n_tiles_(kSharesLhs ? (n_tiles + kCluster - 1) / kCluster : n_tiles),
        rows_(m_tiles / kRowsAUnit),
        odd_(m_tiles % kRowsAUnit),
        bands_(rows_ > kBand ? (rows_ + kBand - 1) / kBand : 1),
        band_rows_((rows_ + bands_ - 1) / bands_) {}

  // Returns how many units of work (kCluster tiles each) cover the grid.
  JGG_HOST_DEVICE int units() const { return rows_ * n_tiles_ + odd_ * ((n_tiles_ + 1) / 2); }

  // Returns the tile that CTA `rank` of the cluster computes in unit `unit`.
  JGG_HOST_DEVICE TileCoordinate at(int unit, int rank) const {
    int const band = band_rows_ == 0 ? 0 : min(unit / (band_rows_ * n_tiles_), bands_ - 1);
    int const in_band = unit - band * band_rows_ * n_tiles_;
    int const rows = band + 1 < bands_ ? band_rows_ : rows_ - band * band_rows_;
    int const odd = band + 1 < bands_ ? 0 : odd_;

    // Columns go two at a time so that the odd row, which takes two columns in one unit, is swept
    // together with the band that holds the same rhs columns in L2.
    int const per_column_pair = 2 * rows + odd;
    int const column_pair = in_band / per_column_pair;
    int const in_pair = in_band - column_pair * per_column_pair;
    int const columns = min(2, n_tiles_ - 2 * column_pair);
    if (in_pair >= rows * columns) {
      return {kCluster * rows_, 2 * column_pair + rank, Share::kLhs};
    }
    int const column = in_pair / rows;
    int const row = band * band_rows_ + in_pair - column * rows;
    if constexpr (kSharesLhs) {
      return {row, kCluster * (2 * column_pair + column) + rank, Share::kLhs};
    }
    return {kCluster * row + rank, 2 * column_pair + column,
            kCluster == 2 ? Share::kRhs : Share::kNothing};
  }

 private:
  JGG_HOST_DEVICE static int min(int a, int b) { return a < b ? a : b; }

  int n_tiles_;  // tiles along N, or units if all tiles are paired along N
  int rows_;     // rows of units, without the left-over row of tiles
  int odd_;      // 1 if a last row of tiles is left over
  int bands_;
  int band_rows_;
};

}  // namespace jgg
