// A row of logits by runs of neighbouring tokens, the last one filled up with -infinity. For files as in vectors.h.

#pragma once

#include "draw.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr float kInfinity = __builtin_inff();

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

class Logits {
 public:
  Logits(const float* x, int64_t count) : x_(x), whole_(count / kRun), runs_((count + kRun - 1) / kRun) {
    for (int64_t i = 0; i < kRun; ++i) rest_[i] = whole_ * kRun + i < count ? x[whole_ * kRun + i] : -kInfinity;
  }

  int64_t runs() const { return runs_; }
  const float* operator[](int64_t run) const { return run < whole_ ? x_ + run * kRun : rest_; }

  float largest(int64_t run) const {
    const float* const x = (*this)[run];
    Floats top = load(x);
    for (int64_t i = LANES; i < kRun; i += LANES) top = larger(load(x + i), top);
    return max_lane(top);
  }

 private:
  const float* x_;
  int64_t whole_, runs_;
  float rest_[kRun];
};

}  // namespace
}  // namespace jaxserve
