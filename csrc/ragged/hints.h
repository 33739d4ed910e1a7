// Chooses the L2 hint of stored results from the group sizes.
#pragma once

#include "scheduler/group_sizes.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

// Returns the hint for the results of a contracting product.
inline StoreHint result_hint(GroupSizes const& groups) {
  return has_few_rows(groups) ? StoreHint::kEvictFirst : StoreHint::kNormal;
}

}  // namespace jgg::sm90
