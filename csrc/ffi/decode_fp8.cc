// The binding of an FP8 layer of few tokens: checks the buffers, reads the sizes, and launches five
// kernels, each of which may begin while the previous one runs.
#include <array>
#include <string>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "mlp/quantized_hidden.h"
#include "mlp/sorted_rows.h"
#include "rows/rows.h"
#include "scaled/scaled_ragged_dot.h"
#include "scheduler/ceil_div.h"

namespace jgg {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

constexpr char kName[] = "decode_fp8_mlp";

int blocks(int size) { return ceil_div(size, kScaleBlock); }

// Quantised rows or matrices, in FP8, with scales of blocks of 128.
struct Quantized {
  ffi::AnyBuffer values;
  Floats scales;
};

// Fails unless rows are [rows, columns] with a scale for each 1 x 128.
void check_rows(Call& call, char const* name, Quantized const& rows, int count, int columns) {
  call.expect<2>(name, rows.values, {count, columns});
  call.expect<2>("the scales of rows", rows.scales, {count, blocks(columns)});
  call.expect_vectors(name, rows.values);
}

// Returns the product of rows [m, k] and matrices [local_groups, n, k]: out [m, n].
ScaledArguments product(Call& call, Quantized const& rows, Quantized const& matrices,
                        ffi::AnyBuffer const& out, GroupSizes const& groups) {
  constexpr char kTypes[] = "the kernels multiply float8_e4m3fn or float8_e5m2";
  ScaledArguments a{};
  auto const [m, n] = call.size<2>("a product", out);
  int const k = call.size<2>("the rows of a product", rows.values)[1];
  call.expect<3>("the matrices", matrices.values, {groups.local_groups, n, k});
  call.expect<3>("the scales of matrices", matrices.scales,
                 {groups.local_groups, blocks(n), blocks(k)});
  call.expect_vectors("the matrices", matrices.values);
  call.expect_vectors("a product", out);
  a.lhs = rows.values.untyped_data();
  a.rhs = matrices.values.untyped_data();
  a.out = out.untyped_data();
  a.type = call.type(rows.values, kFloat8s, kTypes);
  a.rhs_type = call.type(matrices.values, kFloat8s, kTypes);
  a.out_type = call.type(out, {ElementType::kBf16}, "the kernels of a layer take bf16");
  a.lhs_scales = {rows.scales.typed_data(), 0, blocks(k), 1};
  a.rhs_scales = {matrices.scales.typed_data(), 0, int64_t(blocks(n)) * blocks(k), blocks(k), 1};
  a.groups = groups;
  a.m = m;
  a.n = n;
  a.k = k;
  a.follows = true;
  return a;
}

// Computes y [tokens, D]. `wi` has the matrices of gate and up, in the layout of projections, and
// `wo` those of down. All results except y are buffers between kernels.
ffi::Error decode_fp8_mlp(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> experts,
                          Floats weights, Sizes group_offset, ffi::AnyBuffer wi, Floats wi_scales,
                          ffi::AnyBuffer wo, Floats wo_scales, Result y, Result q,
                          ffi::Result<Floats> scales, ffi::Result<Floats> row_weights,
                          ffi::Result<Sizes> places, ffi::Result<Sizes> sizes, Result projections,
                          Result hidden, ffi::Result<Floats> hidden_scales, Result products,
                          ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile(KernelKind::kSwapped);
  // Matrices have the format of rows, and no kernel multiplies two operands in E5M2.
  mlp::QuantizedHiddenFormat const format{
      call.type(*q, {ElementType::kE4m3}, "the kernels of a layer quantise to float8_e4m3fn"),
      call.get<bool>("power_of_two")};
  auto const [tokens, d] = call.size<2>("x", x);
  auto const [token_rows, choices] = call.size<2>("experts", experts);
  if (token_rows != tokens || tokens * int64_t(choices) > mlp::Pairs::kMost) {
    call.fail("experts does not have a row for each token, or has too many elements");
  }
  if (call.failed()) return call.error();
  int const m = tokens * choices, f = call.size<2>("hidden", *hidden)[1];
  int const groups = call.size<1>("sizes", *sizes)[0];
  if (groups > mlp::Pairs::kMostGroups) {
    call.fail("kernels that sort pairs take up to " + std::to_string(mlp::Pairs::kMostGroups) +
              " groups");
  }
  for (ffi::AnyBuffer const& buffer : {x, *y, *projections, *products}) {
    call.type(buffer, {ElementType::kBf16}, "the kernels of an expert MLP take bf16");
  }
  if (hidden->element_type() != q->element_type()) call.fail("hidden and tokens differ in type");
  call.expect<2>("weights", weights, {tokens, choices});
  call.expect<1>("group_offset", group_offset, {1});
  call.expect<2>("y", *y, {tokens, d});
  call.expect<1>("the weights of rows", *row_weights, {m});
  call.expect<2>("the places of pairs", *places, {tokens, choices});
  call.expect<2>("the products of hidden", *products, {m, d});
  check_rows(call, "tokens", {*q, *scales}, m, d);
  check_rows(call, "hidden", {*hidden, *hidden_scales}, m, f);

  mlp::SortedRows const sorted{x.untyped_data(),
                               experts.typed_data(),
                               weights.typed_data(),
                               m,
                               choices,
                               groups,
                               d,
                               format.power_of_two,
                               static_cast<uint8_t*>(q->untyped_data()),
                               scales->typed_data(),
                               row_weights->typed_data(),
                               places->typed_data(),
                               sizes->typed_data()};
  GroupSizes of_rows{};
  of_rows.sizes = sizes->typed_data();
  of_rows.offset = group_offset.typed_data();
  of_rows.batches = 1;
  of_rows.groups = groups;
  of_rows.local_groups = call.size<3>("wi", wi)[0];
  of_rows.rows = m;
  mlp::QuantizedHidden step{};
  step.projections = {projections->untyped_data(), row_weights->typed_data(), call.activation(), m,
                      f};
  step.q = static_cast<uint8_t*>(hidden->untyped_data());
  step.scale = hidden_scales->typed_data();
  step.follows = true;
  call.expect<2>("the projections", *projections, {m, 2 * step.projections.pitch()});
  auto const up = product(call, {*q, *scales}, {wi, wi_scales}, *projections, of_rows);
  auto const down = product(call, {*hidden, *hidden_scales}, {wo, wo_scales}, *products, of_rows);
  rows::CombineArguments sum{};
  sum.shape = {ElementType::kBf16, d, 1};
  sum.rows.rows = m;
  sum.pairs.row.data = places->typed_data();
  sum.pairs.tokens = tokens;
  sum.pairs.choices = choices;
  sum.y.data = products->untyped_data();
  sum.x = y->untyped_data();
  sum.follows = true;
  if (call.failed()) return call.error();

  cudaError_t status = mlp::quantize_sorted(sorted, stream);
  if (status == cudaSuccess) status = scaled_ragged_noncontracting(tile, up, stream);
  if (status == cudaSuccess) status = mlp::quantize_hidden(format, step, stream);
  if (status == cudaSuccess) status = scaled_ragged_noncontracting(tile, down, stream);
  if (status == cudaSuccess) status = rows::combine_rows(sum, stream);
  return launched(status, kName);
}

Handler<decode_fp8_mlp> const handler{"decode_fp8_mlp.v1"};

}  // namespace
}  // namespace jgg
