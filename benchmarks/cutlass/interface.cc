// The C interface of the library, which names kernels. Python calls it through ctypes.
#include <map>

#include "kernels.h"
#include "plan.h"

using jgg::peers::Plan;
using jgg::peers::Problem;

namespace {

thread_local std::string last_error;

int fail(std::string message) {
  last_error = std::move(message);
  return 1;
}

}  // namespace

extern "C" {

// The error message of the last function that returned nonzero in this thread.
char const* jgg_cutlass_error() { return last_error.c_str(); }

// Binds problems to a kernel. If `sort` is nonzero, sorts them by descending k first.
int jgg_cutlass_make(char const* name, Problem const* problems, int count, int sort, Plan** plan) {
  try {
    auto const& kernels = jgg::peers::kernels();
    auto const found = kernels.find(name);
    if (found == kernels.end()) return fail(std::string("there is no kernel ") + name);
    std::vector<Problem> list(problems, problems + count);
    *plan = found->second(sort ? jgg::peers::sorted(std::move(list)) : list).release();
    return 0;
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

// Enqueues a plan's kernel on a stream.
int jgg_cutlass_run(Plan* plan, cudaStream_t stream) {
  cutlass::Status const status = plan->run(stream);
  return status == cutlass::Status::kSuccess ? 0 : fail(cutlassGetStatusString(status));
}

void jgg_cutlass_free(Plan* plan) { delete plan; }

}  // extern "C"
