// The names of compiled kernels: what Python's plan chooses by. No CUTLASS here.
#pragma once

namespace jgg::sm90 {

// How the two consumer warpgroups of a CTA divide its work.
enum class KernelSchedule {
  kCooperative,  // half of the rows of every tile each
  kPingpong,     // every other tile each: one stores while the other one multiplies
};

constexpr char const* name(KernelSchedule schedule) {
  return schedule == KernelSchedule::kPingpong ? "pingpong" : "cooperative";
}

struct TileConfig {
  int tile_m;
  int tile_n;
  int cluster;
  KernelSchedule schedule = KernelSchedule::kCooperative;
  bool stream_k = false;  // the last wave is cut along K: noncontracting products of 16-bit types
};

}  // namespace jgg::sm90
