// The interface of the kernel that draws the next token of a row of logits (draw.cc). The instruction set is chosen at run time
// (machine.h).

#pragma once

#include <cstdint>

namespace jaxserve {

// A row of logits and its sampling parameters, as sampling/ops.py defines them and the order of operations.
struct DrawnRow {
  const float* logits;  // [vocab]
  int64_t vocab;
  // The tokens that penalties count, or null. `seen` and `counts` have size [vocab].
  const bool* seen;
  const int32_t* counts;
  // The biased tokens and their biases, of size [biased] each. The first negative token ends them.
  const int32_t* bias_ids;
  const float* biases;
  int64_t biased;
  int32_t top_k;
  float top_p, min_p, presence, frequency, repetition, temperature;
  float uniform;  // in [0, 1)

  bool penalized() const { return counts != nullptr && (repetition != 1 || frequency != 0 || presence != 0); }
  bool is_biased() const { return biased > 0 && bias_ids[0] >= 0; }
};

constexpr int64_t kRun = 128;  // neighbouring tokens whose weights have a stored sum and a stored maximum

inline int64_t draw_scratch_floats(int64_t vocab) {
  const int64_t runs = (vocab + kRun - 1) / kRun;
  return (3 * runs + 1) * kRun + 3 * runs;
}

constexpr int32_t kNoToken = -1;  // the token of a row whose logits are not finite

// A kernel: it returns the drawn token, or kNoToken. `scratch` has draw_scratch_floats(vocab) floats.
using Draw = int32_t (*)(const DrawnRow& row, float* scratch);

extern const Draw kDrawAvx512, kDrawAvx2, kDrawBaseline;

}  // namespace jaxserve
