// The binding of an FP8 layer of few tokens: checks the buffers, reads the sizes, and launches
// three kernels. The second and the third may each begin while the kernel before it runs.
#include <string>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "mlp/quantizing_product.h"
#include "rows/rows.h"
#include "scheduler/ceil_div.h"

namespace jgg {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

constexpr char kName[] = "decode_fp8_mlp";

int blocks(int size) { return ceil_div(size, kScaleBlock); }

// Matrices [local_groups, n, k] with scales of blocks of 128 x 128.
struct Quantized {
  ffi::AnyBuffer values;
  Floats scales;
};

// Checks matrices [local_groups, n, k]. Returns the arguments of their product, without those of
// rows, pairs and the result.
mlp::QuantizingArguments product(Call& call, char const* name, Quantized const& matrices,
                                 GroupSizes const& groups, int n, int k) {
  mlp::QuantizingArguments a{};
  call.expect<3>(name, matrices.values, {groups.local_groups, n, k});
  call.expect<3>("the scales of matrices", matrices.scales,
                 {groups.local_groups, blocks(n), blocks(k)});
  call.expect_vectors(name, matrices.values);
  call.type(matrices.values, {ElementType::kE4m3}, "the kernels of a layer multiply float8_e4m3fn");
  a.matrices = matrices.values.untyped_data();
  a.scales = {matrices.scales.typed_data(), 0, int64_t(blocks(n)) * blocks(k), blocks(k), 1};
  a.groups = groups;
  a.n = n;
  a.k = k;
  a.power_of_two = call.get<bool>("power_of_two");
  return a;
}

// Computes y [tokens, D]. `wi` has the matrices of gate and up, in the layout of projections
// (mlp/quantized_hidden.h), and `wo` those of down. All results except y are buffers between
// kernels.
ffi::Error decode_fp8_mlp(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> experts,
                          Floats weights, Sizes group_offset, ffi::AnyBuffer wi, Floats wi_scales,
                          ffi::AnyBuffer wo, Floats wo_scales, Result y, ffi::Result<Sizes> places,
                          Result projections, Result products, ffi::Dictionary attributes) {
  Call call(attributes);
  auto const [tokens, d] = call.size<2>("x", x);
  auto const [token_rows, choices] = call.size<2>("experts", experts);
  if (token_rows != tokens || tokens * int64_t(choices) > mlp::Pairs::kMost) {
    call.fail("experts does not have a row for each token, or has too many elements");
  }
  auto const [local_groups, wo_d, f] = call.size<3>("wo", wo);
  int const groups = call.get<int32_t>("groups");
  if (groups < 1 || groups > mlp::Pairs::kMostGroups) {
    call.fail("kernels that sort pairs take from 1 to " + std::to_string(mlp::Pairs::kMostGroups) +
              " groups, not " + std::to_string(groups));
  }
  if (call.failed()) return call.error();
  int const m = tokens * choices, pitch = blocks(f) * kScaleBlock;
  for (ffi::AnyBuffer const& buffer : {x, *y, *projections, *products}) {
    call.type(buffer, {ElementType::kBf16}, "the kernels of an expert MLP take bf16");
    call.expect_vectors("an array of bf16", buffer);
  }
  call.expect<2>("weights", weights, {tokens, choices});
  call.expect<1>("group_offset", group_offset, {1});
  call.expect<2>("y", *y, {tokens, d});
  call.expect<2>("the places of pairs", *places, {tokens, choices});
  call.expect<2>("the projections", *projections, {m, 2 * pitch});
  call.expect<2>("the products of hidden", *products, {m, d});

  GroupSizes of_pairs{};
  of_pairs.offset = group_offset.typed_data();
  of_pairs.batches = 1;
  of_pairs.groups = groups;
  of_pairs.local_groups = local_groups;
  of_pairs.rows = m;
  auto up = product(call, "wi", {wi, wi_scales}, of_pairs, 2 * pitch, d);
  up.rows = x.untyped_data();
  up.out = projections->untyped_data();
  up.places = places->typed_data();
  auto down = product(call, "wo", {wo, wo_scales}, of_pairs, d, f);
  down.rows = projections->untyped_data();
  down.row_weights = weights.typed_data();
  down.activation = call.activation();
  down.out = products->untyped_data();
  down.follows = true;
  for (auto* const each : {&up, &down}) {
    each->choices = choices;
    each->pair_groups = experts.typed_data();
  }
  rows::CombineArguments sum{};
  sum.shape = {ElementType::kBf16, d, 1};
  sum.rows.rows = m;
  // The first kernel writes the places. The sum waits for the second kernel, and that one for the
  // first.
  sum.pairs.row.data = places->typed_data();
  sum.pairs.tokens = tokens;
  sum.pairs.choices = choices;
  sum.y.data = products->untyped_data();
  sum.x = y->untyped_data();
  sum.follows = true;
  if (call.failed()) return call.error();

  cudaError_t status = mlp::multiply_quantizing(up, stream);
  if (status == cudaSuccess) status = mlp::multiply_quantizing(down, stream);
  if (status == cudaSuccess) status = rows::combine_rows(sum, stream);
  return launched(status, kName);
}

Handler<decode_fp8_mlp> const handler{"decode_fp8_mlp.v2"};

}  // namespace
}  // namespace jgg
