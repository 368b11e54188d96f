// The interface of the kernel for log-probabilities of a row of logits (logprobs.cc). The instruction set is chosen at run time
// (machine.h).

#pragma once

#include <cstdint>

namespace jaxserve {

// A row of logits [vocab], a token, and the memory for the results.
struct RatedRow {
  const float* logits;
  int64_t vocab, token;
  float* logprob;       // the token's log-probability
  int32_t* rank;        // 1 + the number of more likely tokens
  int64_t top;          // the number of most likely tokens to return, at most vocab
  int32_t* top_ids;     // [top], the most likely first, and among equal ones the lower token first
  float* top_logprobs;  // [top]
};

using Rate = void (*)(const RatedRow& row);

extern const Rate kRateAvx512, kRateAvx2, kRateBaseline;

}  // namespace jaxserve
