// The XLA custom calls that draw the next tokens of a step's rows, and store them for the next step.

#include <cstring>
#include <memory>
#include <string>

#include "draw.h"
#include "parallel.h"
#include "variants.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

// The fields of a row's parameters, i32[kFields, R]. Floats are stored by their bits (sampling/ops.py).
enum Field { kSlot, kPosition, kSeed, kTopK = 4, kTopP, kMinP, kPresence, kFrequency, kRepetition, kTemperature, kFields };

struct Words {
  uint32_t first, second;
};

// Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as jax.random uses it.
Words threefry(Words key, Words counter) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key.first, key.second, key.first ^ key.second ^ 0x1bd11bdau};
  uint32_t x = counter.first + keys[0], y = counter.second + keys[1];
  for (uint32_t group = 1; group <= 5; ++group) {
    for (const int rotation : kRotations[(group - 1) % 2]) {
      x += y;
      y = (y << rotation | y >> (32 - rotation)) ^ x;
    }
    x += keys[group % 3];
    y += keys[(group + 1) % 3] + group;
  }
  return {x, y};
}

// Returns jax.random.uniform(fold_in(seed, position)).
float uniform(Words seed, uint32_t position) {
  const Words drawn = threefry(threefry(seed, {0, position}), {0, 0});
  const uint32_t bits = (drawn.first ^ drawn.second) >> 9 | 0x3f800000u;
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x - 1;
}

Draw best_draw([[maybe_unused]] int64_t max_lanes) {
#if defined(__x86_64__)
  if (max_lanes >= 16 && may(kDrawing, kAvx512)) return kDrawAvx512;
  if (max_lanes >= 8 && may(kDrawing, kAvx2)) return kDrawAvx2;
#endif
  return kDrawBaseline;
}

struct Drawing final : Shared {
  Draw draw;
  DrawnRow first;  // the first row; its pointers are the beginnings of arrays of all rows
  const int32_t* parameters;
  int64_t spare;  // the spare slot
  int32_t *tokens, *newest, *counts;

  int32_t field(Field name, int64_t row) const { return parameters[name * items + row]; }
  uint32_t word(int name, int64_t row) const { return static_cast<uint32_t>(parameters[name * items + row]); }

  float number(Field name, int64_t row) const {
    float x;
    memcpy(&x, parameters + name * items + row, sizeof(x));
    return x;
  }

  void work() override {
    Items mine(*this);
    if (!mine.more()) return;
    const Scratch memory(static_cast<size_t>(draw_scratch_floats(first.vocab)) * sizeof(float));
    for (; mine.more(); mine.advance()) draw_one(mine.now(), static_cast<float*>(memory.get()));
  }

  // Draws the token of row r. A row of the spare slot draws nothing.
  void draw_one(int64_t r, float* scratch) {
    const int64_t slot = field(kSlot, r);
    tokens[r] = 0;
    if (slot == spare) return;
    DrawnRow row = first;
    row.logits += r * row.vocab;
    if (counts != nullptr) {
      row.seen += slot * row.vocab;
      row.counts += slot * row.vocab;
      row.bias_ids += r * row.biased;
      row.biases += r * row.biased;
    }
    row.top_k = field(kTopK, r);
    row.top_p = number(kTopP, r);
    row.min_p = number(kMinP, r);
    row.presence = number(kPresence, r);
    row.frequency = number(kFrequency, r);
    row.repetition = number(kRepetition, r);
    row.temperature = number(kTemperature, r);
    row.uniform = uniform({word(kSeed, r), word(kSeed + 1, r)}, word(kPosition, r));
    tokens[r] = draw(row, scratch);
    newest[slot] = tokens[r] == kNoToken ? 0 : tokens[r];  // the next step reads it before the host knows of the error
    if (counts != nullptr) ++counts[slot * row.vocab + newest[slot]];
  }
};

using Logits = ffi::Buffer<ffi::F32, 2>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Vector = ffi::Buffer<ffi::S32, 1>;
using Flags = ffi::Buffer<ffi::PRED, 2>;

// Checks the operands that all calls share, and stores them in the job.
ffi::Error prepare(Drawing& job, const Logits& logits, const Table& parameters, const Vector& before, Vector& tokens, Vector& newest,
                   int64_t max_lanes) {
  const int64_t rows = logits.dimensions()[0], slots = static_cast<int64_t>(before.element_count());
  if (parameters.dimensions()[0] != kFields || parameters.dimensions()[1] != rows || logits.dimensions()[1] == 0 || slots == 0) {
    return ffi::Error::InvalidArgument("draw: operands must be logits [R, V], parameters [11, R] and tokens [slots + 1]");
  }
  job.items = rows;
  job.draw = best_draw(max_lanes);
  job.first = {};
  job.first.logits = logits.typed_data();
  job.first.vocab = logits.dimensions()[1];
  job.parameters = parameters.typed_data();
  job.spare = slots - 1;
  job.tokens = tokens.typed_data();
  job.newest = newest.typed_data();
  job.counts = nullptr;
  for (int64_t row = 0; row < rows; ++row) {
    if (job.field(kSlot, row) < 0 || job.field(kSlot, row) >= slots) {
      return ffi::Error::InvalidArgument("draw: slot " + std::to_string(job.field(kSlot, row)) + " is outside " + std::to_string(slots) + " slots");
    }
  }
  memcpy(job.newest, before.typed_data(), before.size_bytes());
  return ffi::Error::Success();
}

ffi::Error draw_tokens(Logits logits, Table parameters, Vector before, ffi::Result<Vector> tokens, ffi::Result<Vector> newest,
                       int64_t max_lanes) {
  auto job = std::make_shared<Drawing>();
  auto error = prepare(*job, logits, parameters, before, *tokens, *newest, max_lanes);
  if (error.failure()) return error;
  run(job, static_cast<int64_t>(logits.element_count()));
  return ffi::Error::Success();
}

ffi::Error draw_adjusted_tokens(Logits logits, Table parameters, Vector before, Flags seen, Table counted, Table bias_ids,
                                Logits biases, ffi::Result<Vector> tokens, ffi::Result<Vector> newest, ffi::Result<Table> counts,
                                int64_t max_lanes) {
  auto job = std::make_shared<Drawing>();
  auto error = prepare(*job, logits, parameters, before, *tokens, *newest, max_lanes);
  if (error.failure()) return error;
  const auto history = counted.dimensions(), ids = bias_ids.dimensions();
  if (history[0] != job->spare + 1 || history[1] != job->first.vocab || seen.element_count() != counted.element_count()) {
    return ffi::Error::InvalidArgument("draw: tokens that penalties count must be [slots + 1, V]");
  }
  if (ids[0] != job->items || biases.element_count() != bias_ids.element_count()) {
    return ffi::Error::InvalidArgument("draw: biases and their tokens must be [R, M]");
  }
  if (counts->untyped_data() != counted.untyped_data()) memcpy(counts->untyped_data(), counted.untyped_data(), counted.size_bytes());
  job->counts = counts->typed_data();
  job->first.seen = seen.typed_data();
  job->first.counts = job->counts;
  job->first.bias_ids = bias_ids.typed_data();
  job->first.biases = biases.typed_data();
  job->first.biased = ids[1];
  run(job, static_cast<int64_t>(logits.element_count()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_draw, jaxserve::draw_tokens,
                              ffi::Ffi::Bind()
                                  .Arg<jaxserve::Logits>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Vector>()
                                  .Ret<jaxserve::Vector>()
                                  .Ret<jaxserve::Vector>()
                                  .Attr<int64_t>("max_lanes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_draw_adjusted, jaxserve::draw_adjusted_tokens,
                              ffi::Ffi::Bind()
                                  .Arg<jaxserve::Logits>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Vector>()
                                  .Arg<jaxserve::Flags>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Logits>()
                                  .Ret<jaxserve::Vector>()
                                  .Ret<jaxserve::Vector>()
                                  .Ret<jaxserve::Table>()
                                  .Attr<int64_t>("max_lanes"));
