// Assigns steps of chains to clusters. Chains are equally long sequences of steps that can be cut
// at any step. All clusters get about the same number of steps, for any number of chains.
#pragma once

#include <cmath>

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"

namespace jgg {

// The steps at which chains are cut. All clusters compute the same cuts. Full waves, which give a
// whole chain to each cluster, are not cut. The remaining chains are fewer than the clusters. They
// are all cut at the same steps, into as many pieces as there are clusters for, unless the pieces
// would be too short to be worth it. Clusters with the same piece of different chains therefore
// read the same operands at the same time. If clusters remain, the pieces end early. The tails,
// which are the steps left at the ends of the chains, are laid end to end and dealt to the
// remaining clusters in equal shares.
class ChainCuts {
 public:
  // The cost of the fixup between two pieces, in K tiles. A multiprocessor needs the time of two to
  // three K tiles to write the 128 KB of a tile, and as long again to read them.
  static constexpr int kHandOver = 5;
  // If a cut is closer than this to an end of the tile or tail that it cuts, it moves to that end.
  static constexpr int kLeastPiece = 8;
  // The least steps of a piece, if the chain is that long.
  static constexpr int kLeastReach = 16;
  // The end of every chain.
  static constexpr int kEnd = 0x7fffffff;
  // Chains and clusters below these limits keep all arithmetic within 32 bits.
  static constexpr int kLongest = 1 << 24;
  static constexpr int kMostClusters = 144;

  ChainCuts() = default;
  // `longest` is the number of steps of the longest tile of a chain. One cluster adds all sums of a
  // tile.
  JGG_HOST_DEVICE ChainCuts(int chains, int length, int longest, int clusters)
      : length_(length),
        cut_(chains % clusters),
        whole_(chains - cut_),
        pieces_(0),
        spare_(0),
        reach_(0),
        adding_(0) {
    if (cut_ == 0) return;
    int const most = clusters / cut_;
    pieces_ = min(most, max(length / least_reach(longest), 1));
    reach_ = ceil_div(length, pieces_);
    adding_ = cost_of_adding(longest);
    int const spare = clusters - pieces_ * cut_;
    if (pieces_ < most || spare == 0) return;
    int const shared_reach = static_cast<int>(
        (unsigned(cut_) * unsigned(length + kHandOver) + clusters - 1) / unsigned(clusters));
    // A cluster hands over a sum for each tail that it gets.
    int const cost = (cut_ / spare + 2) * kHandOver;
    if (reach_ - shared_reach < cost + kLeastPiece) return;
    spare_ = spare;
    reach_ = shared_reach;
    adding_ = cost_of_adding(longest);
  }

  // Returns how many chains are whole: one cluster computes each of them from end to end. Later
  // chains are cut.
  JGG_HOST_DEVICE int whole() const { return whole_; }
  JGG_HOST_DEVICE int cut() const { return cut_; }
  // Returns the number of pieces of each chain that is cut. The tail does not count.
  JGG_HOST_DEVICE int pieces() const { return pieces_; }
  // Returns the number of clusters that compute tails.
  JGG_HOST_DEVICE int spare() const { return spare_; }

  JGG_HOST_DEVICE int length() const { return length_; }

  // Returns the steps of the busiest of `clusters` clusters, plus the time in steps of adding the
  // sums of the longest tile.
  JGG_HOST_DEVICE int busy(int clusters) const {
    return whole_ / clusters * length_ + reach_ + adding_;
  }

  // sums() returns how many sums can be handed over, and most_sums() returns the most for chains of
  // any length.
  JGG_HOST_DEVICE int sums() const { return cut_ * sums_of_chain(); }
  static int most_sums(int chains, int clusters) {
    int const cut = chains % clusters;
    return cut == 0 ? 0 : cut * (clusters / cut + 1);
  }
  // Returns how many sums of a chain can be handed over: one of each piece but the first, and two
  // of the tail, which may have two parts.
  JGG_HOST_DEVICE int sums_of_chain() const { return pieces_ - 1 + (spare_ > 0 ? 2 : 0); }

  // Returns the first step of part `part` of cut chain number `cut`, or kEnd if the chain has no
  // such part. The parts of a chain are its pieces, its tail, and the part of the tail that the
  // next cluster computes.
  JGG_HOST_DEVICE int begin(int cut, int part) const {
    if (part < pieces_) return part * reach_;
    if (spare_ == 0 || part > pieces_ + 1) return kEnd;
    if (part == pieces_) return tails_begin();
    int const share = cut * spare_ / cut_ + 1;
    if (share * cut_ >= (cut + 1) * spare_) return kEnd;
    int const step = share_begin(share).step;
    return step > tails_begin() ? step : kEnd;
  }

  struct Place {
    int cut;
    int step;
  };

  // Returns where share `share` of the tails begins. There is a share for each spare cluster.
  JGG_HOST_DEVICE Place share_begin(int share) const {
    int const tail = length_ - tails_begin() + kHandOver;
    unsigned const tails = unsigned(share) * cut_;
    int const cut = static_cast<int>(tails / spare_);
    unsigned const at = tails * (tail / spare_) + tails * (tail % spare_) / spare_;
    int const before = max(static_cast<int>(at - unsigned(cut) * tail) - kHandOver, 0);
    int const after = length_ - tails_begin() - before;
    if (before < kLeastPiece) return {cut, tails_begin()};
    if (after < kLeastPiece) return {cut + 1, tails_begin()};
    return {cut, tails_begin() + before};
  }

  JGG_HOST_DEVICE int tails_begin() const { return pieces_ * reach_; }

 private:
  JGG_HOST_DEVICE static int min(int a, int b) { return a < b ? a : b; }
  JGG_HOST_DEVICE static int max(int a, int b) { return a > b ? a : b; }

  // Returns the least steps of a piece that are worth it. Pieces of r steps take the time of r
  // steps and of longest / r additions, and an addition takes kHandOver / 2 steps. The total is
  // least if r is the square root of longest * kHandOver / 2. The r here is a little larger, so
  // that there are fewer sums to wait for.
  JGG_HOST_DEVICE static int least_reach(int longest) {
    return max(kLeastReach, static_cast<int>(sqrtf(float(kHandOver) * float(longest))));
  }
  // Returns the time in steps of handing a sum over and adding the sums of the longest tile. To
  // hand over or to add one sum takes kHandOver / 2.
  JGG_HOST_DEVICE int cost_of_adding(int longest) const {
    return (1 + ceil_div(longest, max(reach_, 1))) * kHandOver / 2;
  }

  int length_;
  int cut_;
  int whole_;
  int pieces_;
  int spare_;
  int reach_;   // steps of each piece
  int adding_;  // time of handing sums over and adding them, in steps
};

// Consecutive steps of one chain.
struct ChainRange {
  int chain;
  int begin;
  int end;
  int part;  // of the chain, as in `ChainCuts::begin`
};

// The ranges of one cluster, in the order in which it computes them. Clusters with later steps of a
// chain come first in the grid: see the comment of `Assignment`. All ranges of a cluster but its
// last one end at the end of a chain, so the cluster hands all its sums over before it waits for a
// sum.
class ChainAssignment {
 public:
  JGG_HOST_DEVICE ChainAssignment(ChainCuts const& cuts, int cluster, int clusters)
      : clusters_(clusters), chain_(cluster), cut_{0, ChainCuts::kEnd}, part_(0), last_{0, 0} {
    int const number = cluster - cuts.spare();
    if (number < 0) {
      cut_ = cuts.share_begin(-1 - number);
      last_ = cuts.share_begin(-number);
      part_ = cut_.step == cuts.tails_begin() ? cuts.pieces() : cuts.pieces() + 1;
    } else if (number < cuts.pieces() * cuts.cut()) {
      int const reversed = number / cuts.cut();
      part_ = cuts.pieces() - 1 - reversed;
      int const cut = number - reversed * cuts.cut();
      cut_ = {cut, cuts.begin(cut, part_)};
      last_ = {cut, cuts.begin(cut, part_ + 1)};
    }
  }

  // Sets `range` to the cluster's next range. Returns false after the last range.
  JGG_HOST_DEVICE bool next(ChainCuts const& cuts, ChainRange& range) {
    if (chain_ < cuts.whole()) {
      range = {chain_, 0, ChainCuts::kEnd, 0};
      chain_ += clusters_;
      return true;
    }
    int const end = cut_.cut == last_.cut ? last_.step : ChainCuts::kEnd;
    if (cut_.cut > last_.cut || cut_.step >= end) return false;
    range = {cuts.whole() + cut_.cut, cut_.step, end, part_};
    cut_ = {cut_.cut + 1, cuts.tails_begin()};
    part_ = cuts.pieces();
    return true;
  }

 private:
  int clusters_;
  int chain_;              // the next chain that is computed from end to end
  ChainCuts::Place cut_;   // where the next range of a cut chain begins
  int part_;               // which part of its chain this range is
  ChainCuts::Place last_;  // where the last range ends
};

}  // namespace jgg
