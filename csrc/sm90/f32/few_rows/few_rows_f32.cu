#include "sm90/f32/few_rows/launch.h"

namespace jgg::sm90 {

cudaError_t few_rows_f32(TileConfig config, RaggedDotArguments const& arguments,
                         cudaStream_t stream) {
  return f32::few_rows::launch_any(config, arguments, stream);
}

}  // namespace jgg::sm90
