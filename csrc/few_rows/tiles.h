// The kernels that are compiled for groups of few rows. Python's plan chooses among them.
#pragma once

#include "dispatch.h"

namespace jgg::few_rows {

// Rows that share what is read of a matrix, and the columns of matrices in a stage.
using Tiles = TileTable<Tile<32, 128, 1, KernelKind::kSwapped>>;

}  // namespace jgg::few_rows
