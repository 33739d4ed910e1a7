// The kernels of one element type, chosen by run-time arguments.
#pragma once

#include "mlp/gated.h"
#include "mlp/gradient.h"
#include "mlp/kernel.h"
#include "mlp/paired.h"
#include "sm90/launch.h"

namespace jgg::mlp {

template <class Element, bool kTransposeRhs>
using Config =
    sm90::KernelConfig<Element, Element, cute::GMMA::Major::K,
                       kTransposeRhs ? cute::GMMA::Major::K : cute::GMMA::Major::MN, 128, 256, 2>;

template <class Element>
cudaError_t launch_gated(GatedArguments const& arguments, cudaStream_t stream) {
  using Problem = GatedProduct<Config<Element, false>>;
  return launch<Problem>(mlp_kernel<Problem>, arguments, stream);
}

template <class Element>
cudaError_t launch_gradient(GatedGradientArguments const& arguments, cudaStream_t stream) {
  using Problem = GatedGradient<Config<Element, true>>;
  return launch<Problem>(mlp_kernel<Problem>, arguments, stream);
}

template <class Element>
cudaError_t launch_paired(PairedArguments const& arguments, cudaStream_t stream) {
  using Problem = PairedProduct<Config<Element, true>>;
  return launch<Problem>(sm90::ragged_kernel<Problem, sm90::Mainloop<Problem>>, arguments, stream);
}

}  // namespace jgg::mlp
