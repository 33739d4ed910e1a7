#include "grouped/grouped_gemm.h"
#include "parts/listed_workspace.h"

namespace jgg {
namespace {

// Returns the lhs of all problems, then the rhs of all problems.
std::vector<parts::MatrixStack> operands_of(GroupedGemmArguments const& arguments) {
  std::vector<parts::MatrixStack> operands;
  for (GroupedGemmProblem const& problem : arguments.problems) {
    operands.push_back({problem.lhs, problem.matrices, int64_t(problem.m) * problem.k});
  }
  for (GroupedGemmProblem const& problem : arguments.problems) {
    operands.push_back({problem.rhs, problem.matrices, int64_t(problem.k) * problem.n});
  }
  return operands;
}

}  // namespace

int64_t grouped_gemm_workspace_bytes(GroupedGemmArguments const& arguments) {
  return parts::ListedWorkspace(operands_of(arguments), arguments.accuracy, nullptr).bytes();
}

cudaError_t split_operands(GroupedGemmArguments const& arguments, GroupedGemmArguments& parts,
                           cudaStream_t stream) {
  auto const operands = operands_of(arguments);
  parts::ListedWorkspace const workspace(operands, arguments.accuracy, arguments.workspace);
  if (workspace.bytes() > arguments.workspace_bytes) return cudaErrorInvalidValue;
  parts = arguments;
  size_t const count = parts.problems.size();
  parts.lhs_maxima = workspace[0].maxima;
  parts.rhs_maxima = workspace[count].maxima;
  for (size_t i = 0; i < count; ++i) {
    parts.problems[i].lhs = workspace[i].parts;
    parts.problems[i].rhs = workspace[count + i].parts;
  }
  return parts::prepare(operands, workspace, stream);
}

}  // namespace jgg
