#include "parts/listed_workspace.h"

namespace jgg::parts {
namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

ListedWorkspace::ListedWorkspace(std::vector<MatrixStack> const& stacks, Accuracy accuracy,
                                 void* memory)
    : memory_(static_cast<uint8_t*>(memory)), accuracy_(accuracy), parts_(stacks.size()) {
  int64_t matrices = 0;
  for (MatrixStack const& stack : stacks) matrices += stack.matrices;
  auto* maxima = reinterpret_cast<unsigned*>(take(matrices * int64_t(sizeof(unsigned))));
  bytes_to_clear_ = bytes_;
  for (size_t i = 0; i < stacks.size(); ++i) {
    int64_t const elements = stacks[i].matrices * stacks[i].elements * parts_of(accuracy);
    parts_[i] = {take(elements * int64_t(sizeof(uint16_t))), maxima};
    maxima += stacks[i].matrices;
  }
}

uint8_t* ListedWorkspace::take(int64_t bytes) {
  uint8_t* const start = memory_ + bytes_;
  bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return start;
}

}  // namespace jgg::parts
