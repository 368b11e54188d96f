// A row of logits as runs of kRun neighbouring tokens. Only for files that are compiled once per instruction set (vectors.h).

#pragma once

#include "draw.h"
#include "vectors.h"

namespace jaxserve {
namespace {

constexpr float kInfinity = __builtin_inff();

// Returns whether a row of logits is valid: no NaN, and a finite maximum. Single logits may be -infinity, which bans a token.
// `sums` are the sums that Logits::largest computes.
inline bool is_valid(float largest, Floats sums) {
  for (int i = 0; i < LANES; ++i) {
    if (sums[i] != sums[i]) return false;
  }
  return largest > -kInfinity && largest < kInfinity;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// A view of a row of logits as runs. The last run is padded with -infinity.
class Logits {
 public:
  Logits(const float* x, int64_t count) : x_(x), whole_(count / kRun), runs_((count + kRun - 1) / kRun) {
    for (int64_t i = 0; i < kRun; ++i) rest_[i] = whole_ * kRun + i < count ? x[whole_ * kRun + i] : -kInfinity;
  }

  bool is(const float* x) const { return x_ == x; }
  int64_t runs() const { return runs_; }
  const float* operator[](int64_t run) const { return run < whole_ ? x_ + run * kRun : rest_; }

  // Returns the largest logit of a run, ignoring NaN.
  float largest(int64_t run) const {
    Floats ignored = {};
    return largest(run, ignored);
  }

  // Returns the largest logit of a run, ignoring NaN, and adds the logits to `sums`. A NaN makes a lane of `sums` NaN for good.
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
