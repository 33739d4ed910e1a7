// The names of compiled kernels: what Python's plan chooses by. No CUTLASS here.
#pragma once

namespace jgg::sm90 {

// How the consumers share the work: each has half of every tile's rows, or they take turns and each
// has every other tile.
enum class KernelSchedule { kCooperative, kPingpong };

struct TileConfig {
  int tile_m;
  int tile_n;
  int cluster;
  bool stream_k = false;  // the last wave is cut along K: noncontracting products of 16-bit types
};

// Tiles of no more rows than a WGMMA instruction has belong to kernels for groups of few rows, in
// which rows are on the other side of the instruction.
constexpr bool is_transposed(TileConfig tile) { return tile.tile_m <= 64; }

}  // namespace jgg::sm90
