// The XLA custom call that writes keys and values into a KV pool of int8, where it lies. What other pools hold is only
// copied, which XLA's scatter does as fast.

#include <memory>
#include <string>

#include "machine.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kTokens = 16;        // of an item
constexpr int64_t kWorkPerNumber = 4;  // as multiplications are counted

// A row is a token's key or value of one head.
struct Writing final : Shared {
  const char* numbers;  // [tokens, rows, dims]
  const int32_t* slots;
  char* pool;  // [pages, rows, page_tokens, dims codes and a scale]
  int64_t tokens, rows, dims, page_tokens;
  bool bfloat16;

  void work() override {
    const RowFunctions& functions = row_functions();
    for (Items mine(*this); mine.more(); mine.advance()) {
      const int64_t first = mine.now() * kTokens, end = std::min(first + kTokens, tokens);
      for (int64_t token = first; token < end; ++token) write(functions, token);
    }
  }

  void write(const RowFunctions& functions, int64_t token) const {
    const int64_t page = slots[token] / page_tokens, offset = slots[token] % page_tokens;
    const int64_t from_bytes = dims * (bfloat16 ? 2 : 4), to_bytes = dims + 4;
    for (int64_t row = 0; row < rows; ++row) {
      const char* from = numbers + (token * rows + row) * from_bytes;
      functions.quantize(from, dims, bfloat16, pool + ((page * rows + row) * page_tokens + offset) * to_bytes);
    }
  }
};

using Slots = ffi::Buffer<ffi::S32, 1>;

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("kv_write: " + what); }

// The pool [P, K, 2, S, D + 4] with numbers [T, K, 2, D] at slots (page * S + offset), which are distinct but for those
// of page 0.
ffi::Error kv_write(ffi::AnyBuffer pool, ffi::AnyBuffer numbers, Slots slots, ffi::Result<ffi::AnyBuffer> out) {
  if (pool.untyped_data() != out->untyped_data()) return ffi::Error::Internal("kv_write: the pool was copied");
  const auto shape = pool.dimensions(), written = numbers.dimensions();
  if (shape.size() != 5 || written.size() != 4 || written[1] != shape[1] || written[2] != 2 || shape[2] != 2 ||
      shape[4] != written[3] + 4) {
    return invalid("the pool is [P, K, 2, S, D + 4] and what is written [T, K, 2, D]");
  }
  const bool bfloat16 = numbers.element_type() == ffi::BF16;
  if (pool.element_type() != ffi::S8 || !(bfloat16 || numbers.element_type() == ffi::F32)) {
    return invalid("the pool is of int8 and what is written of bfloat16 or float32");
  }
  if (static_cast<int64_t>(slots.element_count()) != written[0]) return invalid("there is a slot for each token");
  for (int64_t token = 0; token < written[0]; ++token) {
    const int32_t slot = slots.typed_data()[token];
    if (slot < 0 || slot >= shape[0] * shape[3]) {
      return invalid("slot " + std::to_string(slot) + " of a pool of " + std::to_string(shape[0]) + " pages");
    }
  }
  auto job = std::make_shared<Writing>();
  job->numbers = static_cast<const char*>(numbers.untyped_data());
  job->slots = slots.typed_data();
  job->pool = static_cast<char*>(out->untyped_data());
  job->tokens = written[0];
  job->rows = shape[1] * 2;
  job->dims = written[3];
  job->page_tokens = shape[3];
  job->bfloat16 = bfloat16;
  job->items = (job->tokens + kTokens - 1) / kTokens;
  run(job, job->tokens * job->rows * job->dims * kWorkPerNumber);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_kv_write, jaxserve::kv_write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxserve::Slots>()
                                  .Ret<ffi::AnyBuffer>());
