// Times the kernels of a source tree without JAX. Reads problems, and prints a line for each.
//
//   driver [--rounds N] [--pause-us N] [--samples N]
//          [--config N] [--stream-k N] [--few-rows N] < problems
//
// The last three options set the members of Choice. problem.h describes the input. A line of output
// has the label, the median and the least time in microseconds, the speed, the error, and ok or
// WRONG. The speed is in TFLOP/s, or in TB/s for problems that mainly move bytes. The error is the
// largest error of randomly chosen elements, divided by the error that rounding explains. For
// quantisers and copies, the error is the number of wrong values.
#include <cstring>

#include "gated.h"
#include "hidden.h"
#include "quantizer.h"
#include "ragged.h"
#include "scaled.h"
#include "update.h"

namespace driver {
namespace {

struct Options {
  int rounds = 20;
  int pause_us = 2500;
  int samples = 1 << 20;
  Choice choice;
};

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    int* value = nullptr;
    if (!std::strcmp(words[i], "--rounds")) value = &options.rounds;
    if (!std::strcmp(words[i], "--pause-us")) value = &options.pause_us;
    if (!std::strcmp(words[i], "--samples")) value = &options.samples;
    if (!std::strcmp(words[i], "--config")) value = &options.choice.config;
    if (!std::strcmp(words[i], "--stream-k")) value = &options.choice.stream_k;
    if (!std::strcmp(words[i], "--few-rows")) value = &options.choice.few_rows;
    if (value == nullptr || i + 1 == count) {
      std::fprintf(stderr, "unknown option, or an option without a number: %s\n", words[i]);
      std::exit(2);
    }
    *value = std::atoi(words[++i]);
  }
  return options;
}

Prepared prepare(Problem const& problem, Choice const& choice) {
  if (problem.kind.starts_with("fp8_nt")) return prepare_scaled_noncontracting(problem, choice);
  if (problem.kind == "fp8_tn" || problem.kind == "fp8_tn_f32") {
    return prepare_scaled_contracting(problem);
  }
  if (problem.kind == "quantize_rows") return prepare_quantize_rows(problem);
  if (problem.kind == "quantize_weights") return prepare_quantize_weights(problem);
  if (problem.kind == "quantize_ragged") return prepare_quantize_ragged(problem);
  if (problem.kind == "quantize_hidden") return prepare_hidden(problem, false);
  if (problem.kind == "quantize_gradients") return prepare_hidden(problem, true);
  if (problem.kind == "dispatch_fp8") return prepare_dispatch(problem);
  if (problem.kind == "gated_in_place" || problem.kind == "gated_copies") {
    return prepare_gated(problem);
  }
  if (problem.kind == "copy") return prepare_copy();
  if (problem.kind == "syrk" || problem.kind == "syr2k") return prepare_update(problem, choice);
  if (problem.kind == "syr2k_f64" || problem.kind == "her2k_c128") {
    return prepare_fp64_update(problem, choice);
  }
  if (problem.kind == "nn" || problem.kind == "nt" || problem.kind == "tn" ||
      problem.kind == "tn_f32" || problem.kind == "tn_f32_add" ||
      problem.kind == "tn_f32_then_add") {
    return prepare_ragged(problem, choice);
  }
  std::fprintf(stderr, "unknown kind of problem: %s\n", problem.kind.c_str());
  std::exit(2);
}

// Checks and times all problems of the input. Returns whether all results were right.
bool run(Options const& options) {
  bool right = true;
  Problem problem;
  while (read(std::cin, problem)) {
    Prepared const prepared = prepare(problem, options.choice);
    float worst = 0;
    if (options.samples > 0) {
      void* const out = const_cast<void*>(prepared.reference.out);
      if (prepared.initial != nullptr) {
        require(cudaMemcpy(out, prepared.initial, prepared.out_bytes, cudaMemcpyDeviceToDevice),
                "cudaMemcpy");
      } else if (prepared.out_bytes > 0) {
        // Fill the result with NaNs, so that elements which the kernel does not write are found.
        require(cudaMemset(out, 0xff, prepared.out_bytes), "cudaMemset");
      }
      require(prepared.launch(nullptr), problem.label.c_str());
      worst = prepared.worst_error ? prepared.worst_error(options.samples)
                                   : worst_error(prepared.reference, options.samples);
    }
    auto const times =
        time_launches([&] { return prepared.launch(nullptr); }, options.rounds, options.pause_us);
    float const median = times[times.size() / 2];
    bool const ok = worst <= prepared.most_error;
    std::printf("%s\t%.2f\t%.2f\t%.1f\t%.3f\t%s\n", problem.label.c_str(), median, times[0],
                (prepared.bytes > 0 ? prepared.bytes : prepared.flops) / median * 1e-6, worst,
                ok ? "ok" : "WRONG");
    std::fflush(stdout);
    right = right && ok;
  }
  return right;
}

}  // namespace
}  // namespace driver

int main(int count, char** words) { return driver::run(driver::parse(count, words)) ? 0 : 1; }
