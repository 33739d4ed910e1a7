// Binding of products of lists of matrices: check the buffers, list the problems, launch.
#include "grouped/grouped_gemm.h"

#include <limits>
#include <string>
#include <utility>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/stacks.h"
#include "ffi/workspace.h"

namespace jgg {
namespace {

// Returns the problem of one result and its operands, and sets the types of `arguments`.
GroupedGemmProblem problem_of(Call& call, ffi::AnyBuffer const& lhs, ffi::AnyBuffer const& rhs,
                              ffi::AnyBuffer const& out, GroupedGemmArguments& arguments) {
  if (rhs.element_type() != lhs.element_type() ||
      !are_products(lhs.element_type(), out.element_type(), arguments.type, arguments.out_type)) {
    call.fail("the kernels multiply bf16, f16 or f32 into the same type or f32");
  }
  auto const shape =
      ProductShape::of(call, lhs, rhs, out, arguments.transpose_lhs, arguments.transpose_rhs);
  call.expect_operand_vectors("lhs", lhs);
  call.expect_operand_vectors("rhs", rhs);
  call.expect_vectors("a result", out);
  return {lhs.untyped_data(),
          rhs.untyped_data(),
          out.untyped_data(),
          shape.count,
          shape.m,
          shape.n,
          shape.k};
}

// The operands are, in order: alpha [matrices] and beta [matrices], each only if it differs between
// matrices; the schedule [rounds, clusters, 2], if it was made beforehand; lhs...; rhs...; and
// c..., if the call adds C. c and the results are the same memory.
GroupedGemmArguments grouped_gemm_arguments(Call& call, ffi::RemainingArgs operands,
                                            ffi::RemainingRets results) {
  auto const has_alphas = call.get<bool>("has_alphas"), has_betas = call.get<bool>("has_betas");
  auto const has_schedule = call.get<bool>("has_schedule");
  GroupedGemmArguments arguments{};
  arguments.adds_c = call.get<bool>("has_c");
  arguments.alpha = call.get<float>("alpha");
  arguments.beta = call.get<float>("beta");
  arguments.transpose_lhs = call.get<bool>("transpose_lhs");
  arguments.transpose_rhs = call.get<bool>("transpose_rhs");
  size_t const problems = results.size();
  size_t const first_lhs = size_t(has_alphas) + has_betas + has_schedule;
  size_t const first_rhs = first_lhs + problems, first_c = first_rhs + problems;
  if (operands.size() != first_c + (arguments.adds_c ? problems : 0)) {
    call.fail("every operand has as many stacks as there are results");
  }
  if (problems < 1 || problems > kMaxListedProblems) {
    call.fail("a launch takes 1 to " + std::to_string(kMaxListedProblems) + " problems, not " +
              std::to_string(problems));
  }
  if (call.failed()) return arguments;

  int64_t matrices = 0;
  for (size_t i = 0; i < problems; ++i) {
    auto const lhs = *operands.get<ffi::AnyBuffer>(first_lhs + i);
    auto const rhs = *operands.get<ffi::AnyBuffer>(first_rhs + i);
    auto const out = **results.get<ffi::AnyBuffer>(i);
    ElementType const type = arguments.type, out_type = arguments.out_type;
    auto const problem = problem_of(call, lhs, rhs, out, arguments);
    if (i > 0 && (arguments.type != type || arguments.out_type != out_type)) {
      call.fail("problem " + std::to_string(i) + " differs in type from the others");
    }
    if (arguments.adds_c &&
        operands.get<ffi::AnyBuffer>(first_c + i)->untyped_data() != problem.out) {
      call.fail("c of problem " + std::to_string(i) + " is not aliased to its result");
    }
    arguments.problems.push_back(problem);
    matrices += problem.matrices;
  }

  size_t next = 0;
  for (auto [present, scales] :
       {std::pair{has_alphas, &arguments.alphas}, std::pair{has_betas, &arguments.betas}}) {
    if (!present) continue;
    auto const buffer = operands.get<Floats>(next++);
    if (!buffer || int64_t(buffer->element_count()) != matrices) {
      call.fail("alpha and beta are float32 and have an element for each matrix");
    } else {
      *scales = buffer->typed_data();
    }
  }
  if (!has_schedule) return arguments;
  auto const schedule = operands.get<ffi::Buffer<ffi::S32, 3>>(next);
  if (!schedule || schedule->dimensions()[0] < 1 || schedule->dimensions()[1] < 1 ||
      schedule->dimensions()[2] != 2 ||
      schedule->element_count() > std::numeric_limits<int>::max()) {
    call.fail("a schedule is int32 [rounds, clusters, 2]");
    return arguments;
  }
  arguments.schedule = reinterpret_cast<ScheduledUnit const*>(schedule->typed_data());
  arguments.rounds = static_cast<int>(schedule->dimensions()[0]);
  arguments.clusters = static_cast<int>(schedule->dimensions()[1]);
  return arguments;
}

ffi::Error list(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  auto const arguments = grouped_gemm_arguments(call, operands, results);
  if (arguments.type == ElementType::kF32) call.fail("f32 operands have a target of their own");
  if (call.failed()) return call.error();
  return launched(grouped_gemm(tile, arguments, stream), "grouped_gemm");
}

ffi::Error list_f32(cudaStream_t stream, ffi::RemainingArgs operands, WorkspaceResult workspace,
                    ffi::RemainingRets results, ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  auto arguments = grouped_gemm_arguments(call, operands, results);
  if (arguments.type != ElementType::kF32) call.fail("the operands are not f32");
  use_float32_workspace(call, workspace, grouped_gemm_workspace_bytes, arguments);
  if (call.failed()) return call.error();
  return launched(grouped_gemm(tile, arguments, stream), "grouped_gemm_f32");
}

Handler<list> const list_handler{"grouped_gemm.v1"};
Handler<list_f32> const list_f32_handler{"grouped_gemm_f32.v1"};

}  // namespace
}  // namespace jgg
