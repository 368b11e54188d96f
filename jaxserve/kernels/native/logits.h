// A row of logits by runs of neighbouring tokens, the last one filled up with -infinity. For files as in vectors.h.

#pragma once

#include "draw.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr float kInfinity = __builtin_inff();

// Whether this is the largest of finite logits and of banned ones, which are -infinity; `sums` as Logits::largest leaves them.
inline bool is_sound(float largest, Floats sums) {
  for (int i = 0; i < LANES; ++i) {
    if (sums[i] != sums[i]) return false;
  }
  return largest > -kInfinity && largest < kInfinity;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

class Logits {
 public:
  Logits(const float* x, int64_t count) : x_(x), whole_(count / kRun), runs_((count + kRun - 1) / kRun) {
    for (int64_t i = 0; i < kRun; ++i) rest_[i] = whole_ * kRun + i < count ? x[whole_ * kRun + i] : -kInfinity;
  }

  bool is(const float* x) const { return x_ == x; }
  int64_t runs() const { return runs_; }
  const float* operator[](int64_t run) const { return run < whole_ ? x_ + run * kRun : rest_; }

  // The largest that is not NaN.
  float largest(int64_t run) const {
    Floats ignored = {};
    return largest(run, ignored);
  }

  // The same; adds all to `sums`, of which a lane is NaN from the first NaN on.
  float largest(int64_t run, Floats& sums) const {
    const float* const x = (*this)[run];
    Floats top = load(x);
    sums += top;
    for (int64_t i = LANES; i < kRun; i += LANES) {
      const Floats some = load(x + i);
      top = larger(some, top);
      sums += some;
    }
    return max_lane(top);
  }

 private:
  const float* x_;
  int64_t whole_, runs_;
  float rest_[kRun];
};

}  // namespace
}  // namespace jaxserve
