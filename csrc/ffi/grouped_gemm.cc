// Binding of products of lists of matrices: check the buffers, list the problems, launch.
#include "grouped/grouped_gemm.h"

#include <limits>
#include <string>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/element_types.h"
#include "ffi/float32_workspace.h"
#include "ffi/stacks.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

// The attributes of a list of products.
struct ListAttributes {
  bool has_alphas;
  bool has_betas;
  bool has_schedule;
  bool has_c;
  float alpha;
  float beta;
  bool transpose_lhs;
  bool transpose_rhs;
  TileConfig tile;
  int terms;  // of float32 operands: see accuracy_of()

  static ffi::ErrorOr<ListAttributes> of(ffi::Dictionary attributes) {
    Attributes given(attributes);
    ListAttributes const asked{given.get<bool>("has_alphas"),
                               given.get<bool>("has_betas"),
                               given.get<bool>("has_schedule"),
                               given.get<bool>("has_c"),
                               given.get<float>("alpha"),
                               given.get<float>("beta"),
                               given.get<bool>("transpose_lhs"),
                               given.get<bool>("transpose_rhs"),
                               given.tile(),
                               given.get<int32_t>("terms", 0)};
    if (given.error().failure()) return ffi::Unexpected(given.error());
    return asked;
  }
};

// The problem of one result and its operands, whose types go to `arguments`.
ffi::ErrorOr<GroupedGemmProblem> problem_of(ffi::AnyBuffer const& lhs, ffi::AnyBuffer const& rhs,
                                            ffi::AnyBuffer const& out,
                                            GroupedGemmArguments& arguments) {
  if (rhs.element_type() != lhs.element_type() ||
      !are_products(lhs.element_type(), out.element_type(), arguments.type, arguments.out_type)) {
    return ffi::Unexpected(
        invalid("the kernels multiply bf16, f16 or f32 into the same type or f32"));
  }
  auto const shape =
      ProductShape::of(lhs, rhs, out, arguments.transpose_lhs, arguments.transpose_rhs);
  if (!shape) return ffi::Unexpected(shape.error());
  for (auto error :
       {operand_vectors("lhs", lhs), operand_vectors("rhs", rhs), whole_vectors("a result", out)}) {
    if (error.failure()) return ffi::Unexpected(error);
  }
  return GroupedGemmProblem{lhs.untyped_data(),
                            rhs.untyped_data(),
                            out.untyped_data(),
                            shape->count,
                            shape->m,
                            shape->n,
                            shape->k};
}

// Operands: alpha [matrices] and beta [matrices] where they differ between matrices, the schedule
// [rounds, clusters, 2] if it was made beforehand, lhs..., rhs..., and c... if it is added. c and
// the results are the same memory.
ffi::ErrorOr<GroupedGemmArguments> grouped_gemm_arguments(ffi::RemainingArgs operands,
                                                          ffi::RemainingRets results,
                                                          ListAttributes const& asked) {
  auto const unexpected = [](std::string const& message) {
    return ffi::Unexpected(invalid(message));
  };
  size_t const problems = results.size();
  size_t const first_lhs = size_t(asked.has_alphas) + asked.has_betas + asked.has_schedule;
  size_t const first_rhs = first_lhs + problems, first_c = first_rhs + problems;
  if (operands.size() != first_c + (asked.has_c ? problems : 0)) {
    return unexpected("every operand has as many stacks as there are results");
  }
  if (problems < 1 || problems > kMaxListedProblems) {
    return unexpected("a launch takes 1 to " + std::to_string(kMaxListedProblems) +
                      " problems, not " + std::to_string(problems));
  }
  GroupedGemmArguments arguments{};
  arguments.transpose_lhs = asked.transpose_lhs;
  arguments.transpose_rhs = asked.transpose_rhs;
  arguments.adds_c = asked.has_c;
  arguments.alpha = asked.alpha;
  arguments.beta = asked.beta;

  int64_t matrices = 0;
  for (size_t i = 0; i < problems; ++i) {
    auto const lhs = operands.get<ffi::AnyBuffer>(first_lhs + i);
    auto const rhs = operands.get<ffi::AnyBuffer>(first_rhs + i);
    auto out = results.get<ffi::AnyBuffer>(i);
    if (!lhs) return ffi::Unexpected(lhs.error());
    if (!rhs) return ffi::Unexpected(rhs.error());
    if (!out) return ffi::Unexpected(out.error());
    ElementType const type = arguments.type, out_type = arguments.out_type;
    auto const problem = problem_of(*lhs, *rhs, **out, arguments);
    if (!problem) return ffi::Unexpected(problem.error());
    if (i > 0 && (arguments.type != type || arguments.out_type != out_type)) {
      return unexpected("problem " + std::to_string(i) + " has types of its own");
    }
    if (asked.has_c) {
      auto const c = operands.get<ffi::AnyBuffer>(first_c + i);
      if (!c) return ffi::Unexpected(c.error());
      if (c->untyped_data() != problem->out) {
        return unexpected("c of problem " + std::to_string(i) + " is not aliased to its result");
      }
    }
    arguments.problems.push_back(*problem);
    matrices += problem->matrices;
  }

  size_t next = 0;
  for (auto [present, scales] : {std::pair{asked.has_alphas, &arguments.alphas},
                                 std::pair{asked.has_betas, &arguments.betas}}) {
    if (!present) continue;
    auto const buffer = operands.get<ffi::Buffer<ffi::F32>>(next++);
    if (!buffer) return ffi::Unexpected(buffer.error());
    if (int64_t(buffer->element_count()) != matrices) {
      return unexpected("alpha and beta have an element for each matrix");
    }
    *scales = buffer->typed_data();
  }
  if (asked.has_schedule) {
    auto const schedule = operands.get<ffi::Buffer<ffi::S32, 3>>(next);
    if (!schedule) return ffi::Unexpected(schedule.error());
    auto const shape = schedule->dimensions();
    if (shape[0] < 1 || shape[1] < 1 || shape[2] != 2 ||
        schedule->element_count() > std::numeric_limits<int>::max()) {
      return unexpected("a schedule has shape [rounds, clusters, 2]");
    }
    arguments.schedule = reinterpret_cast<ScheduledUnit const*>(schedule->typed_data());
    arguments.rounds = static_cast<int>(shape[0]);
    arguments.clusters = static_cast<int>(shape[1]);
  }
  return arguments;
}

ffi::Error on_list(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  auto const asked = ListAttributes::of(attributes);
  if (!asked) return asked.error();
  auto const arguments = grouped_gemm_arguments(operands, results, *asked);
  if (!arguments) return arguments.error();
  if (arguments->type == ElementType::kF32) {
    return invalid("f32 operands have a target of their own");
  }
  return launched(grouped_gemm(asked->tile, *arguments, stream), "grouped_gemm");
}

ffi::Error on_list_f32(cudaStream_t stream, ffi::RemainingArgs operands, WorkspaceResult workspace,
                       ffi::RemainingRets results, ffi::Dictionary attributes) {
  auto const asked = ListAttributes::of(attributes);
  if (!asked) return asked.error();
  auto arguments = grouped_gemm_arguments(operands, results, *asked);
  if (!arguments) return arguments.error();
  if (arguments->type != ElementType::kF32) return invalid("the operands are not f32");
  if (auto error =
          use_float32_workspace(workspace, asked->terms, grouped_gemm_workspace_bytes, *arguments);
      error.failure()) {
    return error;
  }
  return launched(grouped_gemm(asked->tile, *arguments, stream), "grouped_gemm_f32");
}

Handler<on_list> const list_handler{"grouped_gemm.v1"};
Handler<on_list_f32> const list_f32_handler{"grouped_gemm_f32.v1"};

}  // namespace
}  // namespace jgg
