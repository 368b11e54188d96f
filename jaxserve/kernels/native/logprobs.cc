// Log-probabilities of a row's token and of its most likely tokens, as `logprobs_of` in sampling/ops.py defines them.

#include "logprobs.h"

#include "logits.h"
#include "vectors.h"

#if LANES == 16
#define RATE kRateAvx512
#elif LANES == 8
#define RATE kRateAvx2
#else
#define RATE kRateBaseline
#endif

namespace jaxserve {
namespace {

// Writes the row.top most likely tokens and their logits, in order. After the first few hundred tokens, hardly any run has another
// one, so that most runs are skipped.
void find_top(const Logits& logits, const RatedRow& row) {
  int64_t found = 0;
  const auto belongs = [&](float x) { return found < row.top || x > row.top_logprobs[row.top - 1]; };
  for (int64_t run = 0; row.top > 0 && run < logits.runs(); ++run) {
    if (!belongs(logits.largest(run))) continue;
    const float* const x = logits[run];
    for (int64_t i = 0; i < kRun && run * kRun + i < row.vocab; ++i) {
      if (!belongs(x[i])) continue;
      int64_t place = found < row.top ? found++ : row.top - 1;
      for (; place > 0 && row.top_logprobs[place - 1] < x[i]; --place) {
        row.top_logprobs[place] = row.top_logprobs[place - 1];
        row.top_ids[place] = row.top_ids[place - 1];
      }
      row.top_logprobs[place] = x[i];
      row.top_ids[place] = static_cast<int32_t>(run * kRun + i);
    }
  }
}

void rate(const RatedRow& row) {
  const Logits logits(row.logits, row.vocab);
  const float of_token = row.logits[row.token];
  float largest = -kInfinity;
  Floats sums = {};
  for (int64_t run = 0; run < logits.runs(); ++run) {
    const float x = logits.largest(run, sums);
    largest = x > largest ? x : largest;
  }
  double total = 0;
  int32_t above = 0;
  for (int64_t run = 0; run < logits.runs(); ++run) {
    const float* const x = logits[run];
    Floats weights = {};
    Ints more_likely = {};
    for (int64_t i = 0; i < kRun; i += LANES) {
      const Floats some = load(x + i);
      weights += exp2((some - largest) * kLog2E);
      more_likely -= some > of_token;
    }
    total += sum(weights);
    for (int i = 0; i < LANES; ++i) above += more_likely[i];
  }
  const float normalizer = is_valid(largest, sums) ? largest + __builtin_logf(static_cast<float>(total)) : __builtin_nanf("");
  *row.logprob = of_token - normalizer;
  *row.rank = 1 + above;
  find_top(logits, row);
  for (int64_t i = 0; i < row.top; ++i) row.top_logprobs[i] -= normalizer;
}

}  // namespace

extern const Rate RATE = rate;

}  // namespace jaxserve
