// Log-probabilities of a row of logits (logprobs.cc), chosen at run time (machine.h).

#pragma once

#include <cstdint>

namespace jaxserve {

// What is asked of a row of logits [vocab], and where it goes.
struct RatedRow {
  const float* logits;
  int64_t vocab, token;
  float* logprob;        // of the token
  int32_t* rank;         // 1 + how many are more likely
  int64_t top;           // at most vocab
  int32_t* top_ids;      // [top], the most likely first; of equal ones the lower token
  float* top_logprobs;   // [top]
};

using Rate = void (*)(const RatedRow& row);

extern const Rate kRateAvx512, kRateAvx2, kRateBaseline;

}  // namespace jaxserve
