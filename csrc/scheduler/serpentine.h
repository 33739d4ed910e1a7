// The order in which clusters take turns at units of work that get cheaper towards the end.
#pragma once

#include "scheduler/host_device.h"

namespace jgg {

// Every other round of units goes to the clusters in reverse: a cluster that got one of the last,
// short units of a round then gets one of the first of the next round, instead of another cluster
// that is behind.
JGG_HOST_DEVICE int serpentine(int unit, int clusters) {
  int const round = unit / clusters, place = unit - round * clusters;
  return round % 2 == 0 ? unit : round * clusters + clusters - 1 - place;
}

}  // namespace jgg
