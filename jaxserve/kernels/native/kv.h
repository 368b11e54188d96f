// Writing of keys and values to KV pools. kv_call.cc does it as a custom call of its own, attention_call.cc as a part of attention.

#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "parallel.h"
#include "pool.h"
#include "variants.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {

using Slots = xla::ffi::Buffer<xla::ffi::S32, 1>;

// A job that writes the keys and values of a step's tokens to a pool in place, and the queries to a buffer. An item is kTokens
// tokens.
struct Writing final : Shared {
  static constexpr int64_t kTokens = 16;
  static constexpr int64_t kWorkPerNumber = 4;  // in multiplications, the unit of kWorkPerThread

  const char* numbers = nullptr;  // [tokens, heads, groups + 2, dims]: queries, key and value of each kv head
  const void *query_norm = nullptr, *key_norm = nullptr;  // [dims]: weights of the norms, or null without norms
  float eps = 0;                                          // the epsilon of the norms
  const float *cos = nullptr, *sin = nullptr;  // [tokens, dims / 2]: angles of rotation, or null without rotation
  const int32_t* slots = nullptr;              // [tokens]: page * page_tokens + offset
  char* queries = nullptr;                     // [tokens, heads, groups, dims]
  Pool pool;                                   // [pages, heads, 2, page_tokens, row]
  int64_t tokens = 0, heads = 0, groups = 0, dims = 0, page_tokens = 0;
  bool bfloat16 = false;  // whether the numbers are bfloat16; otherwise they are float32
  bool int8 = false;      // whether a row of the pool is dims codes and their scale; otherwise it has the type of the numbers

  void work() override {
    const RowFunctions& functions = row_functions();
    const Pages pages = pool.addresses();
    const Scratch normed(static_cast<size_t>(bytes())), turned(static_cast<size_t>(bytes()));
    for (Items mine(*this); mine.more(); mine.advance()) {
      const int64_t first = mine.now() * kTokens, end = std::min(first + kTokens, tokens);
      for (int64_t token = first; token < end; ++token) write(functions, pages, token, normed.get(), turned.get());
    }
  }

  static void run(const std::shared_ptr<Writing>& writing) {
    writing->items = (writing->tokens + kTokens - 1) / kTokens;
    jaxserve::run(writing, writing->tokens * writing->heads * (writing->groups + 2) * writing->dims * kWorkPerNumber);
  }

 private:
  // Returns the bytes of a vector.
  int64_t bytes() const { return dims * (bfloat16 ? 2 : 4); }

  void write(const RowFunctions& functions, const Pages& pages, int64_t token, void* normed, void* turned) const {
    const int64_t size = bytes(), row_bytes = int8 ? dims + 4 : size, half = page_tokens * row_bytes;
    char* key = page_address(pages, slots[token] / page_tokens) + slots[token] % page_tokens * row_bytes;
    for (int64_t head = token * heads; head < (token + 1) * heads; ++head, key += 2 * half) {
      const char* from = numbers + head * (groups + 2) * size;
      for (int64_t i = head * groups; i < (head + 1) * groups; ++i, from += size) {
        rotate(functions, token, norm(functions, from, query_norm, normed), queries + i * size);
      }
      char* const value = key + half;
      rotate(functions, token, norm(functions, from, key_norm, normed), int8 ? turned : key);
      if (int8) {
        functions.quantize(turned, dims, bfloat16, key);
        functions.quantize(from + size, dims, bfloat16, value);
      } else {
        memcpy(value, from + size, static_cast<size_t>(size));
      }
    }
  }

  // Normalises a vector into `to` and returns `to`, or returns the vector itself if there is no norm.
  const void* norm(const RowFunctions& functions, const void* from, const void* weight, void* to) const {
    if (weight == nullptr) return from;
    functions.norm(from, weight, eps, dims, bfloat16, to);
    return to;
  }

  void rotate(const RowFunctions& functions, int64_t token, const void* from, void* to) const {
    const int64_t half = dims / 2;
    if (cos == nullptr) {
      memcpy(to, from, static_cast<size_t>(bytes()));
    } else {
      functions.rotate(from, cos + token * half, sin + token * half, half, bfloat16, to);
    }
  }
};

// Prepares the job that writes numbers [T, K, G + 2, D] at slots (page * S + offset, distinct except in page 0) of a pool
// of segments [P, K, 2, S, R], or returns an error. The pool consists of the first operands and of all results among these. The
// caller adds norms, rotations and queries.
inline xla::ffi::Error prepare_writing(Writing& w, xla::ffi::AnyBuffer numbers, Slots slots,
                                       const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& written) {
  namespace ffi = xla::ffi;
  const auto invalid = [](const std::string& what) { return ffi::Error::InvalidArgument("kv_write: " + what); };
  auto error = w.pool.read(operands, written);
  if (error.failure()) return error;
  const auto shape = w.pool.shape, brought = numbers.dimensions();
  w.bfloat16 = numbers.element_type() == ffi::BF16;
  w.int8 = w.pool.type == ffi::S8;
  if (!w.bfloat16 && numbers.element_type() != ffi::F32) return invalid("keys and values must be bfloat16 or float32");
  if (!w.int8 && w.pool.type != (w.bfloat16 ? ffi::U16 : ffi::F32)) return invalid("the pool must have the dtype of keys and values, or int8");
  if (shape.size() != 5 || brought.size() != 4 || brought[1] != shape[1] || brought[2] < 2 || shape[2] != 2 ||
      shape[4] != brought[3] + (w.int8 ? 4 : 0)) {
    return invalid("the pool must be [P, K, 2, S, D], or D + 4 in int8, and the numbers [T, K, G + 2, D]");
  }
  if (static_cast<int64_t>(slots.element_count()) != brought[0]) return invalid("slots must be [T], one for each token");
  for (int64_t token = 0; token < brought[0]; ++token) {
    const int32_t slot = slots.typed_data()[token];
    if (slot < 0 || slot >= w.pool.pages * shape[3]) {
      return invalid("slot " + std::to_string(slot) + " is outside a pool of " + std::to_string(w.pool.pages) + " pages");
    }
  }
  w.numbers = static_cast<const char*>(numbers.untyped_data());
  w.slots = slots.typed_data();
  w.tokens = brought[0];
  w.heads = brought[1];
  w.groups = brought[2] - 2;
  w.dims = brought[3];
  w.page_tokens = shape[3];
  return ffi::Error::Success();
}

}  // namespace jaxserve
