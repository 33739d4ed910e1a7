#include "parts/listed_workspace.h"
#include "rank_k/rank_k.h"

namespace jgg {
namespace {

// Returns operand a of all stacks, then operand b of all stacks that have one.
std::vector<parts::MatrixStack> operands_of(RankKArguments const& arguments) {
  std::vector<parts::MatrixStack> operands;
  for (auto operand : {&RankKStack::a, &RankKStack::b}) {
    for (RankKStack const& stack : arguments.stacks) {
      if (stack.*operand == nullptr) continue;
      operands.push_back({stack.*operand, stack.matrices, int64_t(stack.n) * stack.k});
    }
  }
  return operands;
}

}  // namespace

int64_t rank_k_workspace_bytes(RankKArguments const& arguments) {
  return parts::ListedWorkspace(operands_of(arguments), arguments.accuracy, nullptr).bytes();
}

cudaError_t split_operands(RankKArguments const& arguments, RankKArguments& parts,
                           cudaStream_t stream) {
  auto const operands = operands_of(arguments);
  parts::ListedWorkspace const workspace(operands, arguments.accuracy, arguments.workspace);
  if (workspace.bytes() > arguments.workspace_bytes) return cudaErrorInvalidValue;
  parts = arguments;
  size_t next = 0;
  for (RankKStack& stack : parts.stacks) {
    stack.a_maxima = workspace[next].maxima;
    stack.a = workspace[next++].parts;
  }
  for (RankKStack& stack : parts.stacks) {
    if (stack.b == nullptr) continue;
    stack.b_maxima = workspace[next].maxima;
    stack.b = workspace[next++].parts;
  }
  return parts::prepare(operands, workspace, stream);
}

}  // namespace jgg
