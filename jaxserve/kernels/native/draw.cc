// Draws the next token of a row of logits: penalties, biases, temperature, min_p, top_k, top_p, and one uniform number, in this
// order. sampling/ops.py defines each operation.
//
// A row is read twice: for its largest logit, and for its weights relative to that logit. The thresholds of top_k and top_p are
// found without sorting and from few tokens, because in most runs of neighbouring tokens even the heaviest one is below them.

#include "draw.h"

#include "logits.h"
#include "vectors.h"

#if LANES == 16
#define DRAW kDrawAvx512
#elif LANES == 8
#define DRAW kDrawAvx2
#else
#define DRAW kDrawBaseline
#endif

namespace jaxserve {
namespace {

typedef int8_t Bytes __attribute__((vector_size(LANES)));
constexpr uint32_t kAboveOne = 0x3f800001;  // the bits of the number after 1

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

struct MostLikely {
  int64_t token;
  float logit;
  bool is_valid;
};

// Returns the first token with the largest logit, or 0 if all logits are -infinity.
MostLikely most_likely(const Logits& logits) {
  float best = -kInfinity;
  Floats sums = {};
  int64_t where = 0;
  for (int64_t run = 0; run < logits.runs(); ++run) {
    const float largest = logits.largest(run, sums);
    if (largest > best) best = largest, where = run;
  }
  int64_t i = 0;
  while (i < kRun && logits[where][i] != best) ++i;
  return {i < kRun ? where * kRun + i : 0, best, is_valid(best, sums)};
}

// The weights of a row. The heaviest weight is 1.
class Weights {
 public:
  Weights(const Logits& logits, float top, const DrawnRow& row, Pieces& pieces)
      : runs_(logits.runs()),
        vocab_(row.vocab),
        weights_(pieces.take(runs_ * kRun)),
        sums_(pieces.take(runs_)),
        tops_(pieces.take(runs_)),
        some_(pieces.take((runs_ + 1) * kRun)) {
    const float scale = kLog2E / row.temperature;  // because weights are computed as powers of 2
    for (int64_t run = 0; run < runs_; ++run) {
      const float* const x = logits[run];
      float* const to = weights_ + run * kRun;
      Floats total = {}, heaviest = {};
      for (int64_t i = 0; i < kRun; i += LANES) {
        const Floats weight = exp2((load(x + i) - top) * scale), kept = weight >= row.min_p ? weight : Floats{};
        store(to + i, kept);
        total += kept;
        heaviest = larger(kept, heaviest);
      }
      sums_[run] = sum(total);
      tops_[run] = max_lane(heaviest);
    }
  }

  // Drops all but the k heaviest tokens and those equal to the k-th. Then drops all but the smallest set of heaviest tokens whose
  // share of the remaining weight reaches p, and those equal to its lightest token.
  void restrict(int64_t k, float p) {
    float lowest = 0;
    if (k < vocab_) {
      if (k <= runs_) {  // k tokens are at least as heavy as the k-th of the runs' heaviest tokens
        memcpy(some_, tops_, static_cast<size_t>(runs_) * sizeof(float));
        lowest = threshold<true>(runs_, static_cast<double>(k), 0);
      }
      lowest = threshold<true>(gather(lowest), static_cast<double>(k), lowest);
    }
    if (p < 1) {
      double all = 0;
      if (lowest > 0) {
        const int64_t count = gather(lowest);
        for (int64_t i = 0; i < count; ++i) all += some_[i];
      } else {
        all = total();
        // All tokens below this weight together weigh less than the share that may be dropped.
        lowest = static_cast<float>((1 - p) * all / static_cast<double>(vocab_) / 2);
      }
      lowest = threshold<false>(gather(lowest), p * all, lowest);
    }
    if (lowest > 0) drop_below(lowest);
  }

  // Returns the token at which the running sum exceeds the share `uniform` of the total. Its weight is never 0.
  int64_t at(float uniform) const {
    double left = (uniform < kMaxShare ? uniform : kMaxShare) * total();
    int64_t run = 0, last = 0;  // `last` is the last run with a weight above 0
    for (; run < runs_; ++run) {
      if (sums_[run] > 0) last = run;
      if (left < sums_[run]) break;
      left -= sums_[run];
    }
    const float* const weights = weights_ + last * kRun;
    int64_t token = 0;
    for (int64_t i = 0; i < kRun; ++i) {
      if (weights[i] > 0) token = last * kRun + i;
      if (run < runs_ && left < weights[i]) break;
      left -= weights[i];
    }
    return token;
  }

 private:
  static constexpr float kMaxShare = 1 - 1e-6f;
  const int64_t runs_, vocab_;
  float *const weights_, *const sums_, *const tops_, *const some_;

  double total() const {
    double all = 0;
    for (int64_t run = 0; run < runs_; ++run) all += sums_[run];
    return all;
  }

  // Copies the weights that are at least `lowest` to some_, and returns their number.
  int64_t gather(float lowest) const {
    int64_t count = 0;
    for (int64_t run = 0; run < runs_; ++run) {
      if (!(tops_[run] >= lowest)) continue;
      for (int64_t i = run * kRun; i < (run + 1) * kRun; ++i) {
        some_[count] = weights_[i];
        count += weights_[i] >= lowest;
      }
    }
    return count;
  }

  // Returns the largest threshold for which the number of weights that reach it is at least `wanted`, or `lowest` if no larger one
  // exists. Without Counts this is the sum of the weights instead of their number. The weights are the first `count` of some_, which
  // is overwritten. The threshold is found by bisection of its bits, because non-negative floats sort like their bits.
  template <bool Counts>
  float threshold(int64_t count, double wanted, float lowest) const {
    uint32_t low = bits_of(lowest), high = kAboveOne;
    double above = 0;  // number or sum of the weights that reach `high`
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const float pivot = float_of(middle);
      for (int64_t i = count; i % LANES; ++i) some_[i] = 0;  // lighter than every pivot
      Ints number = {};
      Floats weight = {};
      for (int64_t i = 0; i < count; i += LANES) {
        const Floats x = load(some_ + i);
        if constexpr (Counts) {
          number -= x >= pivot;
        } else {
          weight += x >= pivot ? x : Floats{};
        }
      }
      const double measure = above + (Counts ? sum(convert<Floats>(number)) : sum(weight));
      const bool reached = measure >= wanted;
      int64_t left = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float x = some_[i];
        some_[left] = x;
        left += (x >= pivot) == reached;
      }
      count = left;
      if (reached) {
        low = middle;
      } else {
        high = middle, above = measure;
      }
    }
    return float_of(low);
  }

  void drop_below(float lowest) {
    for (int64_t run = 0; run < runs_; ++run) {
      Floats total = {};
      for (int64_t i = run * kRun; tops_[run] >= lowest && i < (run + 1) * kRun; i += LANES) {
        const Floats weight = load(weights_ + i), kept = weight >= lowest ? weight : Floats{};
        store(weights_ + i, kept);
        total += kept;
      }
      sums_[run] = sum(total);  // 0 if all are lighter
    }
  }
};

// Returns LANES numbers of a row of any type, of which `count` exist. Zeros stand for the others.
template <typename Vector, typename T>
inline Vector numbers_of(const T* x, int64_t count) {
  Vector numbers = {};
  if (count >= LANES) {
    memcpy(&numbers, x, sizeof(numbers));
  } else {
    memcpy(&numbers, x, static_cast<size_t>(count) * sizeof(T));
  }
  return numbers;
}

// Writes logits with penalties to `to`, whose size is a multiple of LANES. The repetition penalty counts tokens of the prompt and
// generated ones, the others only generated ones.
void penalize(const DrawnRow& row, float* to) {
  for (int64_t i = 0; i < row.vocab; i += LANES) {
    const int64_t count = row.vocab - i;
    const Ints counts = numbers_of<Ints>(row.counts + i, count), seen = convert<Ints>(numbers_of<Bytes>(row.seen + i, count));
    const Floats x = numbers_of<Floats>(row.logits + i, count), times = convert<Floats>(counts);
    const Floats factor = (seen | counts) > 0 ? splat(row.repetition) : splat(1), presence = counts > 0 ? splat(row.presence) : Floats{};
    store(to + i, (x > 0 ? x / factor : x * factor) - row.frequency * times - presence);
  }
}

// Returns the row's logits after penalties and biases, in `to`, or the row's own logits if it has none.
const float* adjusted(const DrawnRow& row, float* to) {
  if (!row.penalized() && !row.is_biased()) return row.logits;
  if (row.penalized()) {
    penalize(row, to);
  } else {
    memcpy(to, row.logits, static_cast<size_t>(row.vocab) * sizeof(float));
  }
  for (int64_t i = 0; i < row.biased && row.bias_ids[i] >= 0; ++i) {
    if (row.bias_ids[i] < row.vocab) to[row.bias_ids[i]] += row.biases[i];
  }
  return to;
}

int32_t draw(const DrawnRow& row, float* scratch) {
  Pieces pieces = {scratch};
  const Logits logits(adjusted(row, pieces.take((row.vocab + kRun - 1) / kRun * kRun)), row.vocab);
  const MostLikely best = most_likely(logits);
  const bool unchanged = logits.is(row.logits);
  if (!(unchanged ? best : most_likely(Logits(row.logits, row.vocab))).is_valid) return kNoToken;
  if (!(row.temperature > 0) || !(best.logit > -kInfinity && best.logit < kInfinity)) {
    return static_cast<int32_t>(best.token);
  }
  Weights weights(logits, best.logit, row, pieces);
  weights.restrict(row.top_k, row.top_p);
  return static_cast<int32_t>(weights.at(row.uniform));
}

}  // namespace

extern const Draw DRAW = draw;

}  // namespace jaxserve
