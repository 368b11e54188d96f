// The XLA custom call for log-probabilities of a step's rows.

#include <memory>
#include <string>

#include "logprobs.h"
#include "parallel.h"
#include "variants.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

Rate best_rate([[maybe_unused]] int64_t max_lanes) {
#if defined(__x86_64__)
  if (max_lanes >= 16 && may(kRating, kAvx512)) return kRateAvx512;
  if (max_lanes >= 8 && may(kRating, kAvx2)) return kRateAvx2;
#endif
  return kRateBaseline;
}

struct Rating final : Shared {
  Rate rate;
  RatedRow first;  // the first row; its pointers are the beginnings of arrays of all rows
  const int32_t* tokens;

  void work() override {
    for (Items mine(*this); mine.more(); mine.advance()) {
      const int64_t r = mine.now();
      rate({first.logits + r * first.vocab, first.vocab, tokens[r], first.logprob + r, first.rank + r, first.top,
            first.top_ids + r * first.top, first.top_logprobs + r * first.top});
    }
  }
};

using Logits = ffi::Buffer<ffi::F32, 2>;
using Tokens = ffi::Buffer<ffi::S32, 1>;
using Floats1 = ffi::Buffer<ffi::F32, 1>;
using Ids = ffi::Buffer<ffi::S32, 2>;

ffi::Error logprobs(Logits logits, Tokens tokens, ffi::Result<Floats1> logprob, ffi::Result<Tokens> rank, ffi::Result<Ids> top_ids,
                    ffi::Result<Logits> top_logprobs, int64_t max_lanes) {
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1], top = top_ids->dimensions()[1];
  const auto has_rows = [rows](const auto& of_rows) { return of_rows.dimensions()[0] == rows; };
  if (!has_rows(tokens) || !has_rows(*logprob) || !has_rows(*rank) || !has_rows(*top_ids) || top > vocab ||
      top_logprobs->element_count() != top_ids->element_count()) {
    return ffi::Error::InvalidArgument("logprobs: operands must be logits [R, V] and tokens [R], with at most V results for each row");
  }
  auto job = std::make_shared<Rating>();
  job->items = rows;
  job->rate = best_rate(max_lanes);
  job->first = {logits.typed_data(), vocab, 0, logprob->typed_data(), rank->typed_data(), top, top_ids->typed_data(),
                top_logprobs->typed_data()};
  job->tokens = tokens.typed_data();
  for (int64_t r = 0; r < rows; ++r) {
    if (job->tokens[r] < 0 || job->tokens[r] >= vocab) {
      return ffi::Error::InvalidArgument("logprobs: token " + std::to_string(job->tokens[r]) + " is outside a vocabulary of " + std::to_string(vocab));
    }
  }
  run(job, static_cast<int64_t>(logits.element_count()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_logprobs, jaxserve::logprobs,
                              ffi::Ffi::Bind()
                                  .Arg<jaxserve::Logits>()
                                  .Arg<jaxserve::Tokens>()
                                  .Ret<jaxserve::Floats1>()
                                  .Ret<jaxserve::Tokens>()
                                  .Ret<jaxserve::Ids>()
                                  .Ret<jaxserve::Logits>()
                                  .Attr<int64_t>("max_lanes"));
