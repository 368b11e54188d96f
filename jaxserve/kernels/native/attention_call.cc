// The XLA custom calls around attention*.cc: checks, the choice of instruction set, and the division into tiles.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "kv.h"
#include "parallel.h"
#include "variants.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kMaxLanes = 16;

// The limits on the choice of a kernel.
struct Limits {
  int64_t max_lanes;
  bool matrix_unit;
};

// Returns the fastest kernel that may serve with at most `max_lanes` floats in a vector, or null if there is none. Except for the
// kernel for codes, kernels process pairs of vectors, so that head_dim must be a multiple of twice the number of lanes.
Attend best_attend(int64_t max_lanes, const Attention& a) {
  const Work work = attention_of(a.bfloat16, a.int8);
  const auto fits = [&](int64_t lanes) { return lanes <= max_lanes && a.head_dim % (2 * lanes) == 0; };
#if defined(__x86_64__)
  if (max_lanes >= kMaxLanes && a.bfloat16 && a.int8 && a.head_dim % 16 == 0 && may(work, kVnni)) return attend_vnni;
  if (fits(16) && may(work, kAvx512)) return attend_avx512;
  if (fits(8) && may(work, kAvx2)) return attend_avx2;
#endif
  return fits(4) && may(work, kPortable) ? attend_baseline : nullptr;
}

// Returns the kernel for decode rows, which have few query rows for each key, or `best`.
Attend decode_attend([[maybe_unused]] int64_t max_lanes, [[maybe_unused]] const Attention& a, Attend best) {
#if defined(__x86_64__)
  if (!a.bfloat16 || a.int8) return best;
  const bool fits = max_lanes >= kMaxLanes && a.head_dim % (2 * kMaxLanes) == 0 && a.head_dim <= 256;
  if (fits && may(kDecoding, kAvx512Bf16)) return attend_decode_avx512;
  if (best == attend_avx2 && may(kDecoding, kAvx2)) return attend_decode_avx2;
#endif
  return best;
}

// Returns the kernel for tiles of prompts: for the matrix unit, for pairs of bfloat16, or `best`. The choice does not depend on a
// tile's length, so that a token's result does not depend on the division of its prompt into chunks.
Attend chunk_attend([[maybe_unused]] Limits limits, [[maybe_unused]] const Attention& a, Attend best) {
#if defined(__x86_64__)
  if (!a.bfloat16 || a.int8 || a.head_dim % 32) return best;
  const Work work = attention_of(true, false);
#if defined(__linux__)
  if (limits.matrix_unit && may(work, kAmx)) return attend_amx;
#endif
  if (limits.max_lanes >= kMaxLanes && may(work, kAvx512Bf16)) return attend_avx512bf16;
#endif
  return best;
}

// The attention of a step. An item is a tile and a kv head. Tiles with the most work come first: tiles of prompts, then decode
// rows.
struct Job final : Shared {
  Pool pool;
  Attention attention;
  Attend decode_attend, chunk_attend;
  std::vector<Tile> tiles;
  int64_t chunks = 0;  // number of tiles of prompts
  int64_t max_tokens = 0;

  void work() override {
    Items mine(*this);
    if (!mine.more()) return;
    const Scratch memory(scratch_floats(attention, max_tokens) * sizeof(float));
    auto* scratch = static_cast<float*>(memory.get());
    for (; mine.more(); mine.advance()) {
      const Tile tile = tile_of(mine.now()), after = mine.knows_after() ? tile_of(mine.after()) : Tile{};
      const Attend attend_tile = mine.now() / attention.kv_heads < chunks ? chunk_attend : decode_attend;
      attend_tile(attention, tile, mine.knows_after() ? &after : nullptr, scratch);
    }
  }

  Tile tile_of(int64_t item) const {
    Tile tile = tiles[item / attention.kv_heads];
    tile.head = item % attention.kv_heads;
    return tile;
  }
};

using Table = ffi::Buffer<ffi::S32, 2>;
using Vector = ffi::Buffer<ffi::S32, 1>;

// Adds a tile to the job, and its multiplications to `work`. Returns an error if the tile would read pages outside the pool.
ffi::Error add_tile(Job& job, const Table& table, int64_t index, int64_t pages, Tile tile, int64_t& work) {
  const Attention& a = job.attention;
  const int64_t width = table.dimensions()[1], end = tile.start + tile.length, begin = first_position(a, tile);
  tile.pages = table.typed_data() + index * width;
  if (tile.start < 0 || end > width * a.page_size) {
    return ffi::Error::InvalidArgument("paged_attention: positions up to " + std::to_string(end) +
                                       " do not fit a page table of width " + std::to_string(width));
  }
  for (int64_t i = begin / a.page_size; i * a.page_size < end; ++i) {
    if (tile.pages[i] < 0 || tile.pages[i] >= pages) {
      return ffi::Error::InvalidArgument("paged_attention: page " + std::to_string(tile.pages[i]) +
                                         " is outside a pool of " + std::to_string(pages) + " pages");
    }
  }
  const int64_t transposition = 8;  // in query rows: a key's transposition takes as long as their products
  work += (end - begin) * a.head_dim * a.kv_heads * (tile.length * a.groups + transposition);
  job.max_tokens = std::max(job.max_tokens, tile.length);
  job.tiles.push_back(tile);
  return ffi::Error::Success();
}

// The contexts of a step's tokens: AttentionMeta of jaxserve/kernels/meta.py.
struct Meta {
  const Table &decode_pages;
  const Vector &decode_lengths;
  const Table &tile_pages;
  const Vector &tile_starts, &tile_lengths;
};

// Computes the attention of a step: `all_tokens` rows of q, padding included, over a pool whose addresses `attention` lacks.
ffi::Error attend(Attention attention, int64_t all_tokens, Pool pool, const Meta& meta, Limits limits) {
  auto job = std::make_shared<Job>();
  job->pool = std::move(pool);
  attention.pool = job->pool.addresses();
  job->attention = attention;
  const int64_t pages = job->pool.pages;
  const Attend best = best_attend(limits.max_lanes, attention);
  job->decode_attend = decode_attend(limits.max_lanes, attention, best);
  job->chunk_attend = chunk_attend(limits, attention, best);
  if (best == nullptr) {
    return ffi::Error::InvalidArgument("paged_attention: no kernel for head_dim " + std::to_string(attention.head_dim));
  }
  const int64_t rows = meta.decode_lengths.element_count(), tiles = meta.tile_starts.element_count();
  const int64_t tokens = tiles ? (all_tokens - rows) / tiles : 0;
  const int64_t token_bytes = attention.kv_heads * attention.groups * attention.head_dim * (attention.bfloat16 ? 2 : 4);
  const auto clear = [&](int64_t row, int64_t count) {  // writes zeros to padding rows
    memset(static_cast<char*>(attention.out) + row * token_bytes, 0, count * token_bytes);
  };
  int64_t work = 0;
  job->tiles.reserve(rows + tiles);
  for (int64_t i = tiles - 1; i >= 0; --i) {  // later tiles of a sequence have more work
    const int64_t length = meta.tile_lengths.typed_data()[i], row = rows + i * tokens;
    if (length < 0 || length > tokens) return ffi::Error::InvalidArgument("paged_attention: tile length out of range");
    clear(row + length, tokens - length);
    if (length == 0) continue;
    auto error = add_tile(*job, meta.tile_pages, i, pages, {row, meta.tile_starts.typed_data()[i], length, nullptr, 0}, work);
    if (error.failure()) return error;
  }
  job->chunks = static_cast<int64_t>(job->tiles.size());
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t length = meta.decode_lengths.typed_data()[i];
    if (length == 0) {
      clear(i, 1);
      continue;
    }
    auto error = add_tile(*job, meta.decode_pages, i, pages, {i, length - 1, 1, nullptr, 0}, work);
    if (error.failure()) return error;
  }
  job->items = static_cast<int64_t>(job->tiles.size()) * job->attention.kv_heads;
  run(job, work);
  return ffi::Error::Success();
}

ffi::Error paged_attention(ffi::AnyBuffer q, Table decode_pages, Vector decode_lengths, Table tile_pages,
                           Vector tile_starts, Vector tile_lengths, ffi::RemainingArgs segments,
                           ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window, int64_t max_lanes,
                           bool matrix_unit) {
  Pool pool;
  auto error = pool.read(segments, segments.size());
  if (error.failure()) return error;
  const auto shape = q.dimensions();
  const bool bfloat16 = q.element_type() == ffi::BF16, int8 = pool.type == ffi::S8;
  const Attention attention = {q.untyped_data(), {},       out->untyped_data(), bfloat16,      int8,  shape[1],
                               shape[2],         shape[3], pool.shape[3],       pool.shape[4], scale, window};
  return attend(attention, shape[0], std::move(pool), {decode_pages, decode_lengths, tile_pages, tile_starts, tile_lengths},
                {max_lanes, matrix_unit});
}

using Angles = ffi::Buffer<ffi::F32, 2>;

// Normalises (if there are norms) and rotates the queries and keys of [T, K, G + 2, D], writes keys and values to the pool,
// and computes attention. Queries are stored in the buffer of the outputs, because every kernel reads a tile's queries before it
// writes the tile's outputs. The remaining operands are the segments of the pool, and then either no norms or two weights.
ffi::Error write_and_attend(ffi::AnyBuffer qkv, Angles cos, Angles sin, Slots slots, Table decode_pages,
                            Vector decode_lengths, Table tile_pages, Vector tile_starts, Vector tile_lengths,
                            ffi::RemainingArgs pool_and_norms, ffi::Result<ffi::AnyBuffer> out,
                            ffi::RemainingRets written, float scale, int64_t window, int64_t max_lanes, bool matrix_unit,
                            float eps) {
  auto writing = std::make_shared<Writing>();
  auto error = prepare_writing(*writing, qkv, slots, pool_and_norms, written);
  if (error.failure()) return error;
  const int64_t angles = writing->tokens * (writing->dims / 2);
  if (writing->dims % 2 || static_cast<int64_t>(cos.element_count()) != angles ||
      static_cast<int64_t>(sin.element_count()) != angles) {
    return ffi::Error::InvalidArgument("write_and_attend: cosines and sines must be [T, D / 2]");
  }
  const size_t segments = written.size(), norms = pool_and_norms.size() - segments;
  for (size_t i = 0; i < norms; ++i) {
    const auto weight = pool_and_norms.get<ffi::AnyBuffer>(segments + i);
    if (norms != 2 || !weight.has_value() || weight->element_type() != qkv.element_type() ||
        static_cast<int64_t>(weight->element_count()) != writing->dims) {
      return ffi::Error::InvalidArgument("write_and_attend: norms must have two weights [D] with the dtype of queries and keys");
    }
    (i ? writing->key_norm : writing->query_norm) = weight->untyped_data();
  }
  writing->eps = eps;
  writing->cos = cos.typed_data();
  writing->sin = sin.typed_data();
  writing->queries = static_cast<char*>(out->untyped_data());
  Writing::run(writing);
  const Attention attention = {out->untyped_data(),  {},                     out->untyped_data(), writing->bfloat16,
                               writing->int8,        writing->heads,         writing->groups,     writing->dims,
                               writing->page_tokens, writing->pool.shape[4], scale,               window};
  return attend(attention, writing->tokens, writing->pool,
                {decode_pages, decode_lengths, tile_pages, tile_starts, tile_lengths}, {max_lanes, matrix_unit});
}

}  // namespace

}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention, jaxserve::paged_attention,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Vector>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Vector>()
                                  .Arg<jaxserve::Vector>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("max_lanes")
                                  .Attr<bool>("matrix_unit"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_write_and_attend, jaxserve::write_and_attend,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jaxserve::Angles>()
                                  .Arg<jaxserve::Angles>()
                                  .Arg<jaxserve::Slots>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Vector>()
                                  .Arg<jaxserve::Table>()
                                  .Arg<jaxserve::Vector>()
                                  .Arg<jaxserve::Vector>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("max_lanes")
                                  .Attr<bool>("matrix_unit")
                                  .Attr<float>("eps"));
